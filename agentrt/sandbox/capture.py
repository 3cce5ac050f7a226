"""`Capture`: what a process wrote, up to a cap: its head and its tail, and a count of the rest.

Pure: bytes in, text out. Memory is bounded by the cap, whatever is written.
"""

from typing import NamedTuple

MARKER_BYTES = 64
"""Room kept for the marker, so that the text with it stays within the cap."""
MIN_BYTES = 4 * MARKER_BYTES
"""The least cap."""


class Captured(NamedTuple):
    """The kept text and what is known of the rest."""

    text: str
    truncated: bool
    total_bytes: int
    decode_errors: int


class Capture:
    """Keeps the first three quarters of `cap` bytes and the last quarter."""

    __slots__ = ("_head", "_head_cap", "_tail", "cap", "total_bytes")

    def __init__(self, cap: int) -> None:
        if cap < MIN_BYTES:
            raise ValueError(f"a cap of {cap} bytes leaves no room; {MIN_BYTES} is the least")
        self.cap, self._head_cap = cap, cap * 3 // 4
        self._head, self._tail = bytearray(), bytearray()
        self.total_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take what was read."""
        self.total_bytes += len(data)
        room = self._head_cap - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(0, len(self._tail) - (self.cap - self._head_cap))]

    def captured(self) -> Captured:
        """All of it as text; if it was more than the cap, head, a marker with the number left out, and tail.

        A cut splits no UTF-8 character.
        """
        if self.total_bytes <= self.cap:
            text, errors = decode(bytes(self._head + self._tail))
            return Captured(text, False, self.total_bytes, errors)
        head = _without_split_end(bytes(self._head[: self._head_cap - MARKER_BYTES]))
        tail = _without_split_start(bytes(self._tail))
        left_out = self.total_bytes - len(head) - len(tail)
        (before, errors), (after, more) = decode(head), decode(tail)
        text = f"{before}\n[... {left_out} bytes left out ...]\n{after}"
        return Captured(text, True, self.total_bytes, errors + more)


def decode(data: bytes) -> tuple[str, int]:
    """The text, with U+FFFD for what is no UTF-8, and how often that was."""
    text = data.decode("utf-8", errors="replace")
    return text, text.count("\ufffd") - data.count("\ufffd".encode())


def _without_split_end(data: bytes) -> bytes:
    """`data` without a character at its end that a cut may have split."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        width = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[:-back] if width > back else data
    return data


def _without_split_start(data: bytes) -> bytes:
    """`data` without up to three bytes that continue a character before it."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
