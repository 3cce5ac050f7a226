"""JSON from outside: what a tool, a client or a file says may be nested as deeply as its author likes."""

from collections.abc import Callable
from typing import Any

import msgspec


def decode(data: bytes | str, kind: Any = Any, dec_hook: Callable[[type, Any], Any] | None = None) -> Any:
    """`msgspec.json.decode`, of which `RecursionError` is a `DecodeError` like any other: the text is nested too deeply."""
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=dec_hook)
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error
