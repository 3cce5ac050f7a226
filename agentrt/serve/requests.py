"""What a client may ask for: the bodies of OpenAI's chat completions and completions, with the fields that we add.

A body is closed: an unknown field is refused, so that a misspelt `temprature` does not pass for the default. Fields of
OpenAI's API that cannot change what is sampled here are accepted and not read (`_Unread`).
"""

from typing import Any, TypeVar

import msgspec

from agentrt.core import json
from agentrt.core.errors import AgentrtError
from agentrt.core.spec import SamplingParams, nearest

T = TypeVar("T")


class BadRequest(AgentrtError, ValueError):
    """A request that is answered with an error, in OpenAI's form. `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.status = message, param, status

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,), {"param": self.param, "status": self.status}


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options` of a streamed request."""

    include_usage: bool = False


class ResponseFormat(msgspec.Struct, frozen=True):
    """`response_format`; only plain text is served."""

    type: str = "text"


class _Unread(msgspec.Struct, frozen=True, kw_only=True):
    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None
    verbosity: Any = None


class GenerationRequest(_Unread, frozen=True, kw_only=True):
    """What both endpoints have."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    turn: int = 0
    """With `seed`, that of a session of the client's own: which turn of it this is."""
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    """The text ends with the stop string instead of before it."""
    return_token_ids: bool = False
    """Add `prompt_token_ids`, and `token_ids` with logprobs and versions to each choice."""

    @property
    def choices(self) -> int:
        """How many samples of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None


class TextRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `/v1/completions`. A prompt in ids is taken as it is; text in it never becomes a control token."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 128
"""At each id. Thousands would take milliseconds of every step, which is everybody's, and a long turn of them the memory."""


def read(body: bytes, kind: type[T]) -> T:
    """The request in a body, or a `BadRequest` that names the field."""
    try:
        request: T = json.decode(body, kind)
    except msgspec.ValidationError as error:
        raise _explained(error, kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    return request


def _explained(error: msgspec.ValidationError, kind: Any) -> BadRequest:
    message, _, path = str(error).partition(" - at `$")
    field = path.strip(".`")
    if "unknown field" in message:
        name = message.split("`")[1]
        known = [one.name for one in msgspec.structs.fields(kind)]
        return BadRequest(f"unknown field {name!r}; {nearest(name, known)}", param=name)
    return BadRequest(f"{field}: {message}" if field else message, param=field or None)


def refuse_unserved(request: ChatRequest | TextRequest) -> None:
    """Raise `BadRequest` for a field that is known and asks for what is not served."""
    if not 1 <= request.choices <= MAX_CHOICES:
        raise BadRequest(f"n must be 1 to {MAX_CHOICES}, not {request.choices}", param="n")
    name, likely = (
        ("logprobs", request.logprobs) if isinstance(request, TextRequest) else ("top_logprobs", request.top_logprobs)
    )
    if likely is not None and not 0 <= likely <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"{name} must be 0 to {MAX_TOP_LOGPROBS}, not {likely}", param=name)
    if isinstance(request, TextRequest):
        asked = {"echo": request.echo, "suffix": request.suffix, "best_of": (request.best_of or 1) > 1}
        for name in (name for name, value in asked.items() if value):
            raise BadRequest(f"{name} is not served; leave it out", param=name)
    elif request.response_format is not None and request.response_format.type != "text":
        raise BadRequest("response_format: only type 'text' is served", param="response_format")


def sampling_params(
    request: GenerationRequest, stop_token_ids: tuple[int, ...], stops: tuple[str, ...], top_logprobs: int | None
) -> SamplingParams:
    """The law that a request asks for. `stop_token_ids` and `stops` are added to its own."""
    given = {
        name: value
        for name in (
            "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "logit_bias", "min_tokens",
        )
        if (value := getattr(request, name)) is not None
    }  # fmt: skip
    own = tuple(request.stop_token_ids or ())
    try:
        return SamplingParams(
            **given,
            stop_token_ids=tuple(dict.fromkeys((*own, *stop_token_ids))),
            stop=tuple(dict.fromkeys((*request.stops, *stops))),
            top_logprobs=top_logprobs or 0,
        )
    except ValueError as error:
        message = str(error).removeprefix("sampling.")
        raise BadRequest(message, param=message.split()[0]) from error
