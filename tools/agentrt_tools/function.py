"""Function: calls a function that some code defines, once for each of many lists of arguments.

Run as `python -I -S function.py`, with `{"code": "def f(x): return x + 1", "name": "f", "cases": [[1], [2]]}` as one JSON
line on standard input; answers `{"result": [{"value": 2}, {"error": "..."}]}`, one for each case, or `{"error": "..."}`
as one JSON line on the file descriptor in AGENTRT_REPLY_FD (standard output without it). What the code prints is
dropped. It knows what goes in and not what should come out: whoever asks compares, so code that reads, patches or leaves
early this program gains nothing. **Only for a sandbox**: it does whatever the code says.
"""

import json
import os
import sys
from typing import Any

NO_CALL = 'expected one JSON line like {"code": "def f(x): return x", "name": "f", "cases": [[1]]}'


def outcomes(code: str, name: str, cases: list[list[Any]]) -> list[dict[str, Any]]:
    """What the function gave for each case: its value, as JSON can say it, or its error."""
    namespace: dict[str, Any] = {"__name__": "solution"}
    exec(compile(code, "<code>", "exec"), namespace)
    return [_outcome(namespace[name], arguments) for arguments in cases]


def _outcome(function: Any, arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"value": json.loads(json.dumps(function(*arguments), allow_nan=False))}
    except Exception as error:  # the code's own
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def main() -> None:
    """Read the call, write the reply."""
    output = os.dup(int(os.environ.get("AGENTRT_REPLY_FD", "1")))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    reply: dict[str, Any]
    try:
        call = json.loads(sys.stdin.readline())
        code, name, cases = str(call["code"]), str(call["name"]), list(call["cases"])
    except (ValueError, KeyError, TypeError):
        reply = {"error": NO_CALL}
    else:
        try:
            reply = {"result": outcomes(code, name, cases)}
        except Exception as error:  # the code's own
            reply = {"error": f"{type(error).__name__}: {error}"[:200]}
    with open(output, "w", encoding="utf-8") as file:
        file.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
