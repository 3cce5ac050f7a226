"""Files: read, write, edit and list text files below the working directory.

Run as `python -I -S files.py`, with one JSON line on standard input (`{"op": "read", "path": "a.txt"}`); answers
`{"result": ...}` or `{"error": "..."}` as one JSON line on the file descriptor in AGENTRT_REPLY_FD (standard output
without it). `read` takes an optional first line `start` and number of `lines`; `write` makes folders on the way; `edit`
replaces `old`, which must be there exactly once, by `new`; `list` gives one name a line, folders with a slash. Links that
lead out are not followed. A killed call leaves the old file or the new one.
"""

import json
import os
import sys
from collections.abc import Callable

MAX_BYTES = 1_000_000


class FilesError(ValueError):
    """The call cannot be done; the message says why."""


def answer(call: dict[str, object], folder: str = ".") -> str:
    """Do one call below `folder`. Raises `FilesError`."""
    operation = OPERATIONS.get(str(call.get("op")))
    if operation is None:
        raise FilesError(f"op is one of {', '.join(OPERATIONS)}")
    name = str(call.get("path") or ".")
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(root, name))
    if path != root and not path.startswith(root + os.sep):
        raise FilesError(f"{name} is outside of the working directory")
    try:
        return operation(path, call)
    except UnicodeDecodeError:
        raise FilesError(f"{name} is no text") from None
    except OSError as error:
        raise FilesError(f"{name}: {error.strerror}") from None


def _read(path: str, call: dict[str, object]) -> str:
    lines = _content(path).splitlines(keepends=True)
    start, count = _number(call, "start", 1), _number(call, "lines", len(lines) or 1)
    return "".join(lines[start - 1 : start - 1 + count])


def _write(path: str, call: dict[str, object]) -> str:
    _replace(path, _text(call, "content"))
    return "ok"


def _edit(path: str, call: dict[str, object]) -> str:
    content, old = _content(path), _text(call, "old")
    found = content.count(old) if old else 0
    if found != 1:
        raise FilesError(f"old is there {found} times; give a text that is there exactly once")
    _replace(path, content.replace(old, _text(call, "new")))
    return "ok"


def _list(path: str, call: dict[str, object]) -> str:
    with os.scandir(path) as entries:
        names = (os.fsencode(entry.name) + b"/" * entry.is_dir(follow_symlinks=False) for entry in entries)
        return b"\n".join(sorted(names)).decode(errors="replace")  # a name need not be text


OPERATIONS: dict[str, Callable[[str, dict[str, object]], str]] = {
    "read": _read,
    "write": _write,
    "edit": _edit,
    "list": _list,
}


def _content(path: str) -> str:
    if not os.path.isfile(path):
        raise FilesError("there is no such file" if not os.path.exists(path) else "that is no file")
    if os.path.getsize(path) > MAX_BYTES:
        raise FilesError(f"the file is larger than {MAX_BYTES} bytes")
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


def _replace(path: str, content: str) -> None:
    if len(content.encode()) > MAX_BYTES:
        raise FilesError(f"the file would be larger than {MAX_BYTES} bytes")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = f"{path}.{os.urandom(4).hex()}.new"  # not by process: two side by side may have the same number
    with open(draft, "x", encoding="utf-8", newline="") as file:
        file.write(content)
    os.replace(draft, path)


def _text(call: dict[str, object], field: str) -> str:
    value = call.get(field)
    if not isinstance(value, str):
        raise FilesError(f"{field} is missing or no text")
    return value


def _number(call: dict[str, object], field: str, default: int) -> int:
    value = call.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FilesError(f"{field} is a number from 1 on")
    return value


def main() -> None:
    """Read the call, write the reply."""
    try:
        reply = {"result": answer(json.loads(sys.stdin.readline()))}
    except FilesError as error:
        reply = {"error": str(error)}
    except (ValueError, AttributeError):
        reply = {"error": 'expected one JSON line like {"op": "list"}'}
    line = json.dumps(reply) + "\n"
    with open(int(os.environ.get("AGENTRT_REPLY_FD", "1")), "w", encoding="utf-8") as output:
        output.write(line)


if __name__ == "__main__":
    main()
