"""How the servers are asked and what they answer, as pure functions: one request in ids, a stream of pieces in ids.

Two dialects: OpenAI's completions with `return_token_ids` (vLLM's name for it; `agentrt serve` adds exact logprobs and
versions), and SGLang's native `/generate`. A reply without ids is refused by the name of the missing field: text is never
encoded again.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec

from agentrt.core.errors import EngineFailure
from agentrt.core.protocol import FinishReason
from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import MOST_VERSION

LawOf = Literal["sampled_distribution", "temperature_only", "raw"]


class Asked(NamedTuple):
    """One request of a turn, or of what is left of it."""

    token_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    """Of the session."""
    turn: int
    """Which turn of the session it is."""
    turn_seed: int
    """Of the turn, for servers that know of no sessions."""


Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""Of an id or a version, as records hold them."""


class Piece(NamedTuple):
    """What came since the last piece."""

    token_ids: list[Number]
    logprobs: list[float]
    versions: list[Number] | None = None
    """None: the server does not say."""
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    cached_tokens: int | None = None
    raw_logprobs: list[float] = []
    kept_logmass: list[float] = []
    seed: int | None = None


class Dialect(Protocol):
    """One way to ask."""

    path: str

    def body(self, asked: Asked) -> dict[str, Any]:
        """The body of a streamed request."""

    def piece(self, event: Mapping[str, Any], so_far: int) -> Piece | None:
        """What an event of the stream says, after `so_far` ids; None if nothing. `EngineFailure` if ids are missing.

        Of an event of another form it may raise anything that such a form leads to: see `read_piece`.
        """


_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
)  # fmt: skip
OFF = SamplingParams()


class OpenAI:
    """Completions of a server that returns token ids. `is_ours`: it is `agentrt serve`."""

    path = "/v1/completions"

    def __init__(self, model: str, *, is_ours: bool) -> None:
        self._model, self._is_ours = model, is_ours

    def body(self, asked: Asked) -> dict[str, Any]:
        """See `Dialect.body`."""
        params = asked.params
        body: dict[str, Any] = {
            "model": self._model, "prompt": list(asked.token_ids), "max_tokens": asked.max_tokens, "stream": True,
            "stream_options": {"include_usage": True}, "return_token_ids": True, "logprobs": 0,
            "seed": asked.turn_seed, "temperature": params.temperature,
        }  # fmt: skip
        body |= {name: getattr(params, name) for name in _NAMES if getattr(params, name) != getattr(OFF, name)}
        if params.stop_token_ids:
            body["stop_token_ids"] = list(params.stop_token_ids)
        if params.stop:
            body |= {"stop": list(params.stop), "include_stop_str_in_output": True}
        if params.logit_bias:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
        if self._is_ours:
            return body | {"seed": asked.seed, "turn": asked.turn}
        return body | {"skip_special_tokens": False}

    def piece(self, event: Mapping[str, Any], so_far: int) -> Piece | None:
        """See `Dialect.piece`."""
        if not event.get("choices"):
            cached = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
            return Piece([], [], cached_tokens=cached) if cached is not None else None
        choice = event["choices"][0]
        ids = _required(choice, "token_ids", "choices[0].token_ids")
        reason = choice.get("finish_reason")
        own = choice.get("agentrt")
        if own is not None:
            return _of_ours(ids, own, reason)
        logprobs = (
            _required(choice.get("logprobs") or {}, "token_logprobs", "choices[0].logprobs.token_logprobs")
            if ids
            else []
        )
        matched = choice.get("stop_reason")
        return Piece(ids, logprobs, finish_reason=_reason(reason), matched_stop=matched)


class SGLang:
    """SGLang's `/generate`: events are cumulative."""

    path = "/generate"

    def body(self, asked: Asked) -> dict[str, Any]:
        """See `Dialect.body`."""
        params = asked.params
        sampling: dict[str, Any] = {"max_new_tokens": asked.max_tokens, "temperature": params.temperature}
        for name in _NAMES:
            if getattr(params, name) != getattr(OFF, name):
                sampling["min_new_tokens" if name == "min_tokens" else name] = getattr(params, name)
        if params.stop_token_ids:
            sampling["stop_token_ids"] = list(params.stop_token_ids)
        if params.stop:
            sampling |= {"stop": list(params.stop), "no_stop_trim": True}
        if params.logit_bias:
            sampling["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
        sampling |= {"skip_special_tokens": False, "sampling_seed": asked.turn_seed % 2**31}
        return {
            "input_ids": list(asked.token_ids), "sampling_params": sampling, "return_logprob": True, "stream": True,
        }  # fmt: skip

    def piece(self, event: Mapping[str, Any], so_far: int) -> Piece | None:
        """See `Dialect.piece`."""
        meta = _required(event, "meta_info", "meta_info")
        entries = _required(meta, "output_token_logprobs", "meta_info.output_token_logprobs")[so_far:]
        reason = meta.get("finish_reason")
        if not entries and not reason:
            return None
        kind = reason["type"] if isinstance(reason, Mapping) else reason
        version = to_version(meta.get("weight_version"))
        return Piece(
            [int(entry[1]) for entry in entries], [float(entry[0]) for entry in entries],
            versions=None if version is None else [version] * len(entries), finish_reason=_reason(kind),
            matched_stop=reason.get("matched") if isinstance(reason, Mapping) else None,
            cached_tokens=meta.get("cached_tokens"),
        )  # fmt: skip


def to_version(text: Any) -> int | None:
    """A server's word for its weights as a number: SGLang's `default` is what it started with. None if it is no version."""
    if text == "default":
        return 0
    digits = str(text).removeprefix("v") if text is not None else ""
    is_short = digits.isdecimal() and len(digits) <= len(str(MOST_VERSION))
    return int(digits) if is_short and int(digits) <= MOST_VERSION else None


def needs_law(params: SamplingParams, law: LawOf) -> str:
    """Why logprobs of `law` are not those of the distribution that `params` sample from; empty if they are."""
    warm = params.temperature != 1.0 and params.temperature >= 1e-5
    cuts = [name for name in ("top_k", "top_p", "min_p") if getattr(params, name) not in (getattr(OFF, name), -1)]
    shaped = [
        name
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
        if getattr(params, name) != getattr(OFF, name)
    ]
    wrong = {
        "sampled_distribution": [],
        "temperature_only": cuts,
        "raw": (["temperature"] if warm else []) + cuts + shaped,
    }[law]
    return ", ".join(wrong)


def read_piece(dialect: Dialect, line: bytes, so_far: int) -> Piece | None:
    """What one line of an event stream says, after `so_far` ids; None if nothing.

    `EngineFailure` for an error that the server sends, and for what no server of this dialect may send: a reply is as
    likely to be wrong as any other input, and its ids and logprobs go into records.
    """
    event = _read_event(line)
    if event is None:
        return None
    try:
        found = dialect.piece(event, so_far)
        piece = None if found is None else msgspec.convert(tuple(found), Piece)
    except (LookupError, TypeError, ValueError, AttributeError, msgspec.ValidationError) as error:
        raise EngineFailure(f"the server sent an event of another form: {error}") from error
    if piece is not None:
        ids, others = len(piece.token_ids), {"logprobs": piece.logprobs, "versions": piece.versions}
        for name, values in others.items():
            if values is not None and len(values) != ids:
                raise EngineFailure(f"the server gave {ids} ids and {len(values)} {name}")
    return piece


def _read_event(line: bytes) -> Mapping[str, Any] | None:
    """The data of a line, if it has any."""
    if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
        return None
    try:
        event = msgspec.json.decode(line.removeprefix(b"data:"), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise EngineFailure(f"the server sent an event that is no JSON object: {error}") from error
    if (given := event.get("error")) is not None:
        raise EngineFailure(
            f"the server failed: {given.get('message', given) if isinstance(given, Mapping) else given}"
        )
    return event


def _of_ours(ids: list[int], own: Mapping[str, Any], reason: str | None) -> Piece:
    logprobs, versions = _required(own, "logprobs", "agentrt.logprobs"), _required(own, "versions", "agentrt.versions")
    return Piece(
        ids, logprobs, versions, finish_reason=own.get("finish_reason") if reason else None,
        matched_stop=own.get("matched_stop"), cached_tokens=own.get("cached_tokens"),
        raw_logprobs=own.get("raw_logprobs", []), kept_logmass=own.get("kept_logmass", []), seed=own.get("seed"),
    )  # fmt: skip


def _reason(given: Any) -> FinishReason | None:
    """Only these end a turn: one that ended by an error, or in a way that is not known, is not whole."""
    if given not in (None, "stop", "length", "abort"):
        raise EngineFailure(f"the server ended a turn by {given!r}, which is neither stop, length nor abort")
    reason: FinishReason | None = given
    return reason


def _required(data: Mapping[str, Any], name: str, field: str) -> Any:
    value = data.get(name)
    if value is None:
        raise EngineFailure(f"the server's reply has no {field}; ids that were sampled are never made from text")
    return value
