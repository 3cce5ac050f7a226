"""Key-value store: text under keys, kept in `kv.json` in the working directory.

Run as `python -I -S kv.py`, with one JSON line on standard input (`{"op": "set", "key": "a", "value": "1"}`), it
answers `{"result": ...}` or `{"error": "..."}` as one JSON line on the file descriptor in AGENTRT_REPLY_FD (standard
output without it). `set` and `delete` answer `ok`, `get` the value, `list` the keys in order, one a line. Calls that
run side by side take turns (a lock file), and a killed call leaves the old file or the new one, never half of one.
"""

import fcntl
import json
import os
import sys
from collections.abc import Callable

STORE, LOCK, DRAFT = "kv.json", "kv.lock", "kv.json.new"

MAX_BYTES = 1_000_000


class StoreError(ValueError):
    """The call cannot be done; the message says why."""


def answer(call: dict[str, object]) -> str:
    """Do one call on the store and give its result. Raises `StoreError`."""
    operation = OPERATIONS.get(str(call.get("op")))
    if operation is None:
        raise StoreError(f"op is one of {', '.join(OPERATIONS)}")
    with open(LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = _read()
        store = dict(before)
        result = operation(store, call)
        if store != before:
            _write(store)
    return result


def _set(store: dict[str, str], call: dict[str, object]) -> str:
    store[_text(call, "key")] = _text(call, "value")
    return "ok"


def _get(store: dict[str, str], call: dict[str, object]) -> str:
    return store[_known(store, call)]


def _delete(store: dict[str, str], call: dict[str, object]) -> str:
    del store[_known(store, call)]
    return "ok"


def _list(store: dict[str, str], call: dict[str, object]) -> str:
    return "\n".join(sorted(store))


OPERATIONS: dict[str, Callable[[dict[str, str], dict[str, object]], str]] = {
    "set": _set,
    "get": _get,
    "delete": _delete,
    "list": _list,
}


def _known(store: dict[str, str], call: dict[str, object]) -> str:
    key = _text(call, "key")
    if key not in store:
        raise StoreError(f"there is no key {key!r}")
    return key


def _text(call: dict[str, object], field: str) -> str:
    value = call.get(field)
    if not isinstance(value, str):
        raise StoreError(f"{field} is missing or no text")
    return value


def _read() -> dict[str, str]:
    try:
        with open(STORE, encoding="utf-8") as file:
            store: dict[str, str] = json.load(file)
            return store
    except FileNotFoundError:
        return {}


def _write(store: dict[str, str]) -> None:
    text = json.dumps(store)
    if len(text) > MAX_BYTES:
        raise StoreError(f"the store would be larger than {MAX_BYTES} bytes")
    with open(DRAFT, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(DRAFT, STORE)


def main() -> None:
    """Read the call, write the reply."""
    try:
        reply = {"result": answer(json.loads(sys.stdin.readline()))}
    except StoreError as error:
        reply = {"error": str(error)}
    except (ValueError, AttributeError):
        reply = {"error": 'expected one JSON line like {"op": "get", "key": "a"}'}
    line = json.dumps(reply) + "\n"
    with open(int(os.environ.get("AGENTRT_REPLY_FD", "1")), "w", encoding="utf-8") as output:
        output.write(line)


if __name__ == "__main__":
    main()
