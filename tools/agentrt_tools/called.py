"""Called: calls one Python function, whose source it is given, with the arguments of a call.

Run as `python -I -S called.py NAME SOURCE`, with the arguments as one JSON line on standard input (`{"x": 1}`); answers
`{"result": ...}`, or `{"error": "..."}` if the function raised, as one JSON line on the file descriptor in
AGENTRT_REPLY_FD (standard output without it). What `agentrt.tool` makes of a decorated function.
"""

import json
import os
import sys
from typing import Any


def answer(name: str, source: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The reply to one call."""
    namespace: dict[str, Any] = {"__name__": "tool"}
    try:
        exec(compile(source, f"<{name}>", "exec"), namespace)
        value = namespace[name](**arguments)
        return {"result": value if isinstance(value, str) else json.loads(json.dumps(value, allow_nan=False))}
    except Exception as error:  # the function's own
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Read the call, write the reply."""
    reply = os.dup(int(os.environ.get("AGENTRT_REPLY_FD", "1")))
    line = json.dumps(answer(sys.argv[1], sys.argv[2], json.loads(sys.stdin.readline())))
    sys.stdout.flush()
    with open(reply, "w", encoding="utf-8") as output:
        output.write(line + "\n")


if __name__ == "__main__":
    main()
