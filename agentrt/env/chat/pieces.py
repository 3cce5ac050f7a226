"""`Pieces`: ids of a rendered text, from template text, content and control tokens.

All text between two control tokens is encoded as one piece, so a template's newline merges with the content beside it
exactly as it does when the whole conversation is encoded at once. Control tokens enter by name only, never from text.
"""

from agentrt.core.tokenizer import Tokenizer


class Pieces:
    """Collects text and control tokens; `ids` gives the encoded whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._text: list[str] = []

    def text(self, text: str) -> None:
        """Append ordinary text, whatever it spells."""
        self._text.append(text)

    def control(self, marker: str) -> None:
        """Append the control token `marker`; a marker that this vocabulary lacks is ordinary text."""
        token_id = self._tokenizer.special.get(marker)
        if token_id is None:
            self._text.append(marker)
            return
        self._flush()
        self._ids.append(token_id)

    def ids(self) -> list[int]:
        """Everything so far."""
        self._flush()
        return list(self._ids)

    def _flush(self) -> None:
        if text := "".join(self._text):
            self._ids += self._tokenizer.encode(text)
        self._text.clear()
