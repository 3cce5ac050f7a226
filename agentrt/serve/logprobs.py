"""Logprobs in OpenAI's two forms: an entry for each sampled id, control tokens included."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentrt.core.tokenizer import Tokenizer


class Sampled(NamedTuple):
    """Sampled ids with their logprobs, and at each the most likely ids if they were asked for."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[Mapping[int, float]] = ()


def chat_logprobs(tokenizer: Tokenizer, sampled: Sampled) -> dict[str, Any]:
    """`choice.logprobs` of a chat completion."""
    content = []
    for index, (token_id, logprob) in enumerate(zip(sampled.token_ids, sampled.logprobs, strict=True)):
        tops = sampled.tops[index] if sampled.tops else {}
        likely = [_entry(tokenizer, other, value) for other, value in tops.items() if math.isfinite(value)]
        content.append(_entry(tokenizer, token_id, logprob) | {"top_logprobs": likely})
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, sampled: Sampled, start: int) -> dict[str, Any]:
    """`choice.logprobs` of a completion. `start`: how many characters of text came before these ids."""
    tokens, offsets = [_text_of(tokenizer, token_id) for token_id in sampled.token_ids], []
    for token in tokens:
        offsets.append(start)
        start += len(token)
    tops = [
        {_text_of(tokenizer, one): value for one, value in top.items() if math.isfinite(value)} for top in sampled.tops
    ]
    return {
        "tokens": tokens, "token_logprobs": list(sampled.logprobs), "top_logprobs": tops or None, "text_offset": offsets,
    }  # fmt: skip


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    spelt = tokenizer.bytes_of(token_id)
    return {"token": _text_of(tokenizer, token_id), "logprob": logprob, "bytes": list(spelt)}


def _text_of(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of an id; one that is half a character is spelt as its bytes, as OpenAI does."""
    spelt = tokenizer.bytes_of(token_id)
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)
