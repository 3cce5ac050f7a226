"""Calls between markers: the loop that all such formats share, and a cursor to read a block with."""

from collections.abc import Callable

from agentrt.env.chat.calls.exact import skip_space
from agentrt.env.chat.calls.format import Parsed
from agentrt.env.chat.message import ToolCall

ReadBlock = Callable[[str, int], tuple[list[ToolCall], int]]
"""From a text and the position after the opening marker: the calls of the block, and where the text after it starts."""


def parse_blocks(text: str, opening: str, read: ReadBlock) -> Parsed:
    """The text outside the blocks and the calls inside, in order. Text without a block comes back unchanged.

    With a block, whitespace around blocks goes and what is left of the text is joined by newlines.
    """
    at = text.find(opening)
    if at < 0:
        return text, ()
    outside, calls = [text[:at].rstrip()], list[ToolCall]()
    while at >= 0:
        found, end = read(text, at + len(opening))
        calls += found
        at = text.find(opening, end)
        outside.append(text[end : at if at >= 0 else None].strip())
    return "\n".join(filter(None, outside)), tuple(calls)


class Cursor:
    """A position in a text."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def skip_space(self) -> None:
        self.at = skip_space(self.text, self.at)

    @property
    def is_at_end(self) -> bool:
        return self.at >= len(self.text)

    def take(self, marker: str) -> bool:
        """Go past `marker` if it is here."""
        found = self.text.startswith(marker, self.at)
        self.at += len(marker) if found else 0
        return found

    def until(self, marker: str) -> str | None:
        """The text up to `marker`, and go past it; None, and no step, if it does not come."""
        end = self.text.find(marker, self.at)
        if end < 0:
            return None
        start, self.at = self.at, end + len(marker)
        return self.text[start:end]

    def jump(self, marker: str) -> None:
        """Go past the next `marker`, or to the end."""
        end = self.text.find(marker, self.at)
        self.at = len(self.text) if end < 0 else end + len(marker)
