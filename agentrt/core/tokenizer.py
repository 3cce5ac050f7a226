"""A tokenizer that keeps text and control tokens apart: text goes to ids, and no text becomes a control token.

Built from a `tokenizer.json` of the Hugging Face `tokenizers` library. Its added tokens are taken out of the encoder, so
`encode("<|im_end|>")` gives ordinary ids whatever the text's origin; the renderer names control tokens by `special`.
"""

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import tokenizers

from agentrt.core.errors import UsageError

SHORT = 16
"""Characters of a text whose ids are remembered: what a chat template says between messages, again and again."""


class Tokenizer:
    """Text to ids and ids to bytes, for a byte-level BPE."""

    def __init__(self, definition: str) -> None:
        data = json.loads(definition)
        self.special: dict[str, int] = {token["content"]: token["id"] for token in data.get("added_tokens", ())}
        """The id of each control token (`<|im_end|>`, `<tool_call>`, ...) by its text."""
        whole = tokenizers.Tokenizer.from_str(definition)
        self.vocab_size = whole.get_vocab_size(with_added_tokens=True)
        self.vocab_size = max(self.vocab_size, 1 + max(self.special.values(), default=0))
        data["added_tokens"], data["post_processor"] = [], None
        self._text = tokenizers.Tokenizer.from_str(json.dumps(data))
        self._encode_short = lru_cache(maxsize=4096)(self._encode)
        self._bytes = _BytesOf(self._text)
        self._bytes.update((token_id, text.encode()) for text, token_id in self.special.items())

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a model folder; a `UsageError` if it has none, or a damaged one."""
        path = folder / "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                f"{path}: cannot be read: {error.strerror}; a model folder needs a tokenizer.json"
            ) from error
        except Exception as error:  # the library raises no narrower one
            raise UsageError(f"{path}: no tokenizer in the format of Hugging Face: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of ordinary text. No control token comes out, whatever the text says."""
        return list(self._encode_short(text)) if len(text) <= SHORT else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        # The batch form, since `encode` keeps the interpreter's lock while it works.
        ids: list[int] = self._text.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that an id stands for; empty for an id the tokenizer does not know."""
        return self._bytes[token_id]

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids, control tokens spelt out; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self._bytes.__getitem__, token_ids)).decode("utf-8", errors="replace")


class _BytesOf(dict[int, bytes]):
    """The bytes of each id, worked out when it is first asked for: decoding is a lookup an id."""

    def __init__(self, text: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._text, self._byte_of = text, _byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._text.id_to_token(token_id) or ""
        found = self[token_id] = b"".join(self._byte_of.get(char, char.encode()) for char in token)
        return found


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's byte-level alphabet, backwards: printable bytes stand for themselves, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): bytes([byte]) for byte in plain}
    return table | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(rest)}
