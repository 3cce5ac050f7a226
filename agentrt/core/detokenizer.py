"""`Detokenizer`: the text of one turn, as its ids come.

It never shows half a character, nor anything that may turn out to be a stop string. What is shown is text for people: ids are
never made from it. It knows the turn's ids only, so bytes of a prompt that ends inside a character are no part of its text.
"""

import codecs
from collections.abc import Callable, Collection, Iterable


class Detokenizer:
    """Put together, what `feed` and `finish` give is the whole text, however the ids are cut into pieces.

    `bytes_of` gives an id's bytes; ids in `skip` (end ids) have no text. Bytes that can belong to no character become U+FFFD.
    """

    __slots__ = ("_bytes_of", "_decoder", "_held", "_skip", "_stops")

    def __init__(
        self, bytes_of: Callable[[int], bytes], stop: Iterable[str] = (), skip: Collection[int] = frozenset()
    ) -> None:
        self._bytes_of, self._skip = bytes_of, skip
        self._stops = [text.encode() for text in stop]
        self._held = b""
        """Not shown yet, because a stop string may begin where it does."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Take sampled ids; returns what can be shown in addition to what was."""
        self._held += b"".join(self._bytes_of(one) for one in token_ids if one not in self._skip)
        shown = min((_possible_start(self._held, stop) for stop in self._stops), default=len(self._held))
        text, self._held = self._decoder.decode(self._held[:shown]), self._held[shown:]
        return text

    def finish(self, matched_stop: int | str | None = None, *, include_stop: bool = False) -> str:
        """The rest of the text. It ends before `matched_stop` (as in `Completion`) if that is a string, or right after it.

        A character that is cut by the end of the turn becomes U+FFFD.
        """
        end = len(self._held)
        if isinstance(matched_stop, str):
            stop = matched_stop.encode()
            end = self._held.index(stop) + (len(stop) if include_stop else 0)
        return self._decoder.decode(self._held[:end], final=True)


def _possible_start(text: bytes, stop: bytes) -> int:
    """Where `stop` begins in `text`, or may begin, if more comes; the length of `text` if it cannot."""
    if (at := text.find(stop)) >= 0:
        return at
    longest = min(len(stop) - 1, len(text))
    return len(text) - next(size for size in range(longest, -1, -1) if text.endswith(stop[:size]))
