"""`Reply`: what a tool says on its reply descriptor: progress, then one line with its result or error.

    {"progress": 0.4, "eta_s": 3}
    {"result": ...}   or   {"error": "..."}

null instead of either means that what it wrote to standard output is the text.

Pure: bytes in, values out, memory bounded.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from agentrt.core import json
from agentrt.sandbox.capture import decode

NOT_A_REPLY = 'the tool\'s reply is not one JSON line {"result": ...} or {"error": "..."}'


MAX_ETA_SECONDS = 1e7
_PROGRESS = re.compile(rb'\s*\{\s*"(?:progress|eta_s)"')


class Progress(msgspec.Struct, frozen=True):
    """How far a tool says it is. A line with any other value in these fields is dropped: it is not worth an error."""

    progress: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """From 0 to 1."""
    eta_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_ETA_SECONDS)] | None = None
    """Seconds to go."""


class Said(NamedTuple):
    """A tool's answer."""

    outcome: Literal["ok", "tool_error", "output"]
    text: str | None
    """None: what the tool wrote to standard output is the text."""
    decode_errors: int = 0


class Reply:
    """Takes lines apart as they come. More than `cap` bytes in a line are no reply; of progress that comes at once the last
    is heard."""

    __slots__ = ("_buffer", "_cap", "_lines", "_on_progress", "_overflowed")

    def __init__(self, cap: int, on_progress: Callable[[Progress], None] | None = None) -> None:
        self._cap, self._on_progress = cap, on_progress
        self._buffer, self._lines, self._overflowed = bytearray(), list[bytes](), False

    def feed(self, data: bytes) -> None:
        """Take what was read."""
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            self._take(bytes(self._buffer + whole).split(b"\n"))
            self._buffer.clear()
        self._buffer += rest
        self._overflowed |= len(self._buffer) > self._cap
        del self._buffer[self._cap :]

    @property
    def has_line(self) -> bool:
        """True once a whole line that is no progress is there."""
        return bool(self._lines) or self._overflowed

    def said(self) -> Said | None:
        """The answer, taken out, for the next one to come; None if nothing was said."""
        lines, overflowed = [*self._lines, *([bytes(self._buffer)] if self._buffer.strip() else [])], self._overflowed
        self._lines, self._buffer, self._overflowed = [], bytearray(), False
        if not lines and not overflowed:
            return None
        if overflowed:
            return Said("output", f"the tool's reply has more than {self._cap} bytes")
        return read(lines[0]) if len(lines) == 1 else Said("tool_error", NOT_A_REPLY)

    def _take(self, lines: Iterable[bytes]) -> None:
        """Whole lines, of which there may be tens of thousands: a second one that is no progress spoils the reply."""
        progress = b""
        for line in filter(bytes.strip, lines):
            if len(self._lines) > 1:
                break
            if _PROGRESS.match(line):
                progress = line
                continue
            self._overflowed |= len(line) > self._cap
            self._lines.append(line)
        if progress and self._on_progress is not None:
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                self._on_progress(json.decode(progress, Progress))


def read(line: bytes) -> Said:
    """One line of a tool's answer."""
    text, errors = decode(line)
    try:
        value = json.decode(text, dict[str, Any])
        is_error, said = ("error" in value), value["error"] if "error" in value else value["result"]
    except (msgspec.DecodeError, KeyError):
        return Said("tool_error", NOT_A_REPLY, errors)
    text_of = said if said is None or isinstance(said, str) else msgspec.json.encode(said).decode()
    return Said("tool_error" if is_error else "ok", text_of, errors)
