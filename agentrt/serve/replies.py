"""What a client gets: completions and chunks in OpenAI's form, and our fields where ids were asked for.

With `return_token_ids` a choice has `token_ids` (vLLM's name) and `agentrt`: the logprob and policy version of each id as
they are recorded, and at the end of the turn what a `Completion` says of it. Everything is strict JSON.
"""

import time
from typing import Any, NamedTuple, Protocol

import msgspec

from agentrt.core.tokenizer import Tokenizer
from agentrt.core.tokens import Floats
from agentrt.serve.choice import Delta
from agentrt.serve.logprobs import chat_logprobs, text_logprobs
from agentrt.serve.messages import call_ids, from_call, from_turn


class Envelope(NamedTuple):
    """What every reply to one request begins with."""

    id: str
    model: str
    created: int
    with_logprobs: bool
    with_ids: bool

    @classmethod
    def new(cls, name: str, model: str, *, with_logprobs: bool, with_ids: bool) -> "Envelope":
        """Stamped now."""
        return cls(name, model, int(time.time()), with_logprobs, with_ids)

    def around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A reply of `kind` with `choices`."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class Form(Protocol):
    """One endpoint's way to write choices. `kind` and `chunk_kind` are the `object` fields."""

    kind: str
    chunk_kind: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that opens a streamed choice, if there is one."""

    def chunk(self, delta: Delta, envelope: Envelope) -> list[dict[str, Any]]:
        """The chunks of a delta; the last one has the finish reason if the choice ended."""

    def whole(self, delta: Delta, envelope: Envelope) -> dict[str, Any]:
        """A choice that was not streamed."""


class ChatForm:
    """`Form` of chat completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def chunk(self, delta: Delta, envelope: Envelope) -> list[dict[str, Any]]:
        """See `Form.chunk`; calls come whole, when the turn has been read."""
        said: dict[str, Any] = {}
        if delta.seen.reasoning:
            said["reasoning_content"] = delta.seen.reasoning
        if delta.seen.content:
            said["content"] = delta.seen.content
        if delta.ended and delta.ended.turn.calls:
            calls, ids = delta.ended.turn.calls, call_ids(delta.ended.turn, delta.ended.completion.seed)
            said["tool_calls"] = [
                {"index": index} | from_call(call, call_id)
                for index, (call, call_id) in enumerate(zip(calls, ids, strict=True))
            ]
        choice = {"index": delta.choice, "delta": said, "finish_reason": None, **self._about(delta, envelope)}
        chunks = [choice] if said or envelope.with_logprobs or envelope.with_ids else []
        if delta.ended:
            end = {"index": delta.choice, "delta": {}, "logprobs": None, "finish_reason": delta.ended.reason}
            chunks.append(end | _end_of_ids(delta, envelope))
        return chunks

    def whole(self, delta: Delta, envelope: Envelope) -> dict[str, Any]:
        """See `Form.whole`."""
        assert delta.ended is not None
        message = from_turn(delta.ended.turn, call_ids(delta.ended.turn, delta.ended.completion.seed))
        choice = {"index": delta.choice, "message": message, "finish_reason": delta.ended.reason}
        return choice | _whole_ids(delta, envelope, self._about(delta, envelope))

    def _about(self, delta: Delta, envelope: Envelope) -> dict[str, Any]:
        logprobs = chat_logprobs(self._tokenizer, delta.sampled) if envelope.with_logprobs else None
        return {"logprobs": logprobs, **_ids(delta, envelope)}


class TextForm:
    """`Form` of completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._told: dict[int, int] = {}
        """Characters told of each choice so far, for `text_offset`."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Nothing opens a text."""
        return None

    def chunk(self, delta: Delta, envelope: Envelope) -> list[dict[str, Any]]:
        """See `Form.chunk`."""
        if not (delta.ended or delta.seen.content or envelope.with_logprobs or envelope.with_ids):
            return []
        choice = self._choice(delta, envelope)
        return [
            choice | ({"agentrt": choice["agentrt"] | _about_turn(delta)} if delta.ended and envelope.with_ids else {})
        ]

    def whole(self, delta: Delta, envelope: Envelope) -> dict[str, Any]:
        """See `Form.whole`."""
        return _whole_ids(delta, envelope, self._choice(delta, envelope))

    def _choice(self, delta: Delta, envelope: Envelope) -> dict[str, Any]:
        logprobs = None
        if envelope.with_logprobs:
            start = self._told.get(delta.choice, 0)
            logprobs = text_logprobs(self._tokenizer, delta.sampled, start)
            self._told[delta.choice] = start + sum(map(len, logprobs["tokens"]))
        reason = delta.ended.reason if delta.ended else None
        return {
            "index": delta.choice, "text": delta.seen.content, "logprobs": logprobs, "finish_reason": reason,
            **_ids(delta, envelope),
        }  # fmt: skip


def usage(prompt_tokens: int, sampled: int, cached_tokens: int) -> dict[str, Any]:
    """Tokens of a request: its prompt once, and all that was sampled."""
    return {
        "prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }  # fmt: skip


def error_body(message: str, *, kind: str, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def encoded(reply: dict[str, Any]) -> bytes:
    """Strict JSON: a number that is none becomes null."""
    return msgspec.json.encode(reply)


def _ids(delta: Delta, envelope: Envelope) -> dict[str, Any]:
    if not envelope.with_ids:
        return {}
    about = {"logprobs": delta.sampled.logprobs, "versions": delta.versions}
    return {"token_ids": list(delta.sampled.token_ids), "agentrt": about}


def _end_of_ids(delta: Delta, envelope: Envelope) -> dict[str, Any]:
    return {"agentrt": _about_turn(delta)} if envelope.with_ids else {}


def _whole_ids(delta: Delta, envelope: Envelope, choice: dict[str, Any]) -> dict[str, Any]:
    if envelope.with_ids:
        choice["agentrt"] |= _about_turn(delta)
    return choice


def _about_turn(delta: Delta) -> dict[str, Any]:
    """What a completion says of a whole turn."""
    assert delta.ended is not None
    completion = delta.ended.completion
    names = (
        "seed", "finish_reason", "matched_stop", "context_tokens", "cached_tokens", "queue_seconds", "prefill_seconds",
        "decode_seconds",
    )  # fmt: skip
    about = {name: getattr(completion, name) for name in names}
    return about | {name: _numbers(getattr(completion, name)) for name in ("raw_logprobs", "kept_logmass")}


def _numbers(values: Floats) -> list[float]:
    """32-bit floats in nine digits, which give them back exactly."""
    return [float(f"{value:.9g}") for value in values]
