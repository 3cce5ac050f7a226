"""Python: runs code that the model wrote, as a notebook runs a cell, and shows what it prints.

Run as `python -I -S python.py`; each line on standard input is a call, `{"code": "1 + 1"}`, and gets one line on the file
descriptor in AGENTRT_REPLY_FD: `{"result": null}`, or `{"error": null}` if the code raised. null says that the text is
what was written to standard output: prints, the value of a last statement that is an expression, the traceback. As the
tool `python` it gets one call; as the tool `repl` it gets one after the other, and what one defines the next ones have.
**Only for a sandbox**: it does whatever the code says.
"""

import ast
import json
import os
import sys
import traceback
from typing import Any

NAME = "<code>"


def run(code: str, namespace: dict[str, Any]) -> bool:
    """Run `code` in `namespace`; False if it raised, and then the traceback is on standard output."""
    try:
        tree = ast.parse(code, NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NAME, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NAME, "eval"), namespace)
            if value is not None:
                print(repr(value))
    except Exception as error:  # the code's own, shown to whoever wrote it
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != NAME:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames, file=sys.stdout)
        return False
    return True


def main() -> None:
    """Answer calls until standard input ends."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    reply = os.dup(int(os.environ.get("AGENTRT_REPLY_FD", "1")))
    for line in sys.stdin:
        answer: dict[str, str | None] = {"error": 'expected one JSON line like {"code": "print(2)"}'}
        try:
            code = str(json.loads(line)["code"])
        except (ValueError, KeyError, TypeError):
            pass
        else:
            answer = {"result" if run(code, namespace) else "error": None}
        sys.stdout.flush()
        os.write(reply, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main()
