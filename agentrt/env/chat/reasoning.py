"""Reasoning in a block at the start of a turn."""

from typing import NamedTuple


class Markers(NamedTuple):
    """What opens and closes a reasoning block."""

    open: str
    close: str


THINK = Markers("<think>", "</think>")


class Parts(NamedTuple):
    """A turn's text, taken apart."""

    reasoning: str
    content: str
    closed: bool
    """False if a block was opened and never closed; all of the text is reasoning then."""


def split(text: str, markers: Markers | None = THINK, *, opened: bool = False) -> Parts:
    """Take the block out; only one that opens the turn counts, and it ends at the first closing marker.

    `opened`: the prompt has opened it already.
    """
    if markers is None:
        return Parts("", text, closed=True)
    body = text.lstrip()
    if not opened and not body.startswith(markers.open):
        return Parts("", text, closed=True)
    reasoning, closing, content = body.removeprefix(markers.open).partition(markers.close)
    return Parts(reasoning.strip("\n"), content.lstrip("\n"), closed=bool(closing))
