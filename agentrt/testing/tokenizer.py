"""A tokenizer with one id a byte, for tests that count ids: `byte_tokenizer().encode("ab") == [97, 98]`."""

import json

from agentrt.core.tokenizer import Tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Ids 256 and up. `<think>` is not among them: it is seven ordinary bytes here."""


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes; the control tokens of ChatML follow."""
    vocabulary = {char: byte for byte, char in enumerate(_alphabet())}
    added = [
        {"id": 256 + index, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for index, text in enumerate(SPECIAL)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    definition = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    return Tokenizer(json.dumps(definition))


def _alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
