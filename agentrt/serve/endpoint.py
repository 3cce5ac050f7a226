"""`Endpoint`: a request body becomes choices over the engine, and these become a reply or a stream of chunks."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio

from agentrt.core.errors import AgentrtError
from agentrt.core.protocol import Grammar
from agentrt.env.chat import offload
from agentrt.env.chat.renderer import Family
from agentrt.serve.choice import Choice, Delta
from agentrt.serve.conversation import Conversation, OpenTurn, Sessions
from agentrt.serve.grammar import CallGrammars
from agentrt.serve.messages import FunctionTool, ToolChoice, to_choice, to_messages, to_tools
from agentrt.serve.replies import ChatForm, Envelope, Form, TextForm, encoded, usage
from agentrt.serve.requests import BadRequest, ChatRequest, GenerationRequest, TextRequest, sampling_params
from agentrt.serve.view import ChatView, TextView

Send = Callable[[bytes], Awaitable[None]]


class Generation(NamedTuple):
    """A request that has been understood and placed, ready to be sampled."""

    form: Form
    envelope: Envelope
    prompt_ids: Sequence[int]
    choices: list[Choice]


class Endpoint:
    """Borrows the engine. `room`: ids that a prompt and its turn may have together."""

    def __init__(self, engine: Sessions, renderer: Family, *, model: str, room: int) -> None:
        self.engine, self.renderer, self.model, self.room = engine, renderer, model, room
        self.tokenizer = renderer.tokenizer
        self._grammars = CallGrammars(renderer, engine.info.vocab_size)

    @asynccontextmanager
    async def chat(self, request: ChatRequest, conversation: Conversation, name: str) -> AsyncIterator[Generation]:
        """A chat completion. `BadRequest` for what cannot be served."""
        messages, tools = to_messages(request.messages), to_tools(request.tools)
        choice = to_choice(request.tool_choice, tools)
        if request.top_logprobs and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        parallel = request.parallel_tool_calls is not False
        closes = self.renderer.calls.closes
        ends_with_call = (closes,) if closes and not parallel and choice.kind != "none" else ()
        params = sampling_params(request, self.renderer.stop_token_ids, ends_with_call, request.top_logprobs)
        asked = (request.max_completion_tokens, request.max_tokens)
        max_tokens = next((number for number in asked if number is not None), None)
        grammars = await self._forced(choice, tools, request.choices, parallel=parallel)
        async with conversation.chat(messages, tools, request.choices) as turns:
            views = [
                ChatView(
                    self.renderer, tools, choice, end_ids=params.stop_token_ids, parallel=parallel, stops=request.stops,
                    keeps_stop=request.include_stop_str_in_output,
                )
                for _ in turns
            ]  # fmt: skip
            granted = self._granted(turns, max_tokens)
            yield Generation(
                ChatForm(self.tokenizer), self._envelope(request, name, bool(request.logprobs)), turns[0].prompt_ids,
                [
                    Choice(index, turn, view, params, granted, keeps_message=True, grammar=grammar)
                    for index, (turn, view, grammar) in enumerate(zip(turns, views, grammars, strict=True))
                ],
            )  # fmt: skip

    @asynccontextmanager
    async def text(self, request: TextRequest, conversation: Conversation, name: str) -> AsyncIterator[Generation]:
        """A completion of one prompt."""
        prompt = await self._prompt(request.prompt)
        params = sampling_params(request, self.renderer.stop_token_ids, (), request.logprobs)
        async with conversation.ids(prompt, request.choices) as turns:
            granted = self._granted(turns, DEFAULT_TEXT_TOKENS if request.max_tokens is None else request.max_tokens)
            views = [
                TextView(
                    self.tokenizer, params.stop_token_ids, request.stops, keeps_stop=request.include_stop_str_in_output
                )
                for _ in turns
            ]
            yield Generation(
                TextForm(self.tokenizer), self._envelope(request, name, request.logprobs is not None), prompt,
                [
                    Choice(index, turn, view, params, granted, keeps_message=False)
                    for index, (turn, view) in enumerate(zip(turns, views, strict=True))
                ],
            )  # fmt: skip

    async def _forced(
        self, choice: ToolChoice, tools: Sequence[FunctionTool], n: int, *, parallel: bool
    ) -> Sequence[Grammar | None]:
        """What each of `n` turns is held to, if it has to be calls."""
        if choice.kind not in ("required", "named"):
            return [None] * n
        these = [tool for tool in tools if choice.name in ("", tool.name)]
        several = parallel and choice.kind == "required"
        return await anyio.to_thread.run_sync(lambda: [self._grammars.of(these, several=several) for _ in range(n)])

    def _envelope(self, request: GenerationRequest, name: str, with_logprobs: bool) -> Envelope:
        return Envelope.new(name, self.model, with_logprobs=with_logprobs, with_ids=request.return_token_ids)

    def _granted(self, turns: Sequence[OpenTurn], asked: int | None) -> int:
        """`max_tokens` of the turns: what was asked for, else all that there is room for."""
        left = self.room - turns[0].context
        if left < 1:
            raise BadRequest(
                f"the prompt has {turns[0].context} ids and there is room for {self.room}, the turn included"
            )
        return left if asked is None else asked

    async def _prompt(self, given: str | list[Any]) -> Sequence[int]:
        if isinstance(given, list) and len(given) == 1 and isinstance(given[0], (str, list)):
            given = given[0]
        if isinstance(given, str):
            ids: Sequence[int] = await offload.encoded(partial(self.tokenizer.encode, given), len(given))
        elif all(type(one) is int for one in given):
            ids = given
        else:
            raise BadRequest("prompt must be one text, or the ids of one", param="prompt")
        if not ids:
            raise BadRequest("prompt is empty", param="prompt")
        return ids


DEFAULT_TEXT_TOKENS = 16
"""`max_tokens` of a completion that asks for none, as OpenAI has it."""


async def whole_reply(generation: Generation) -> dict[str, Any]:
    """Sample every choice; the reply."""
    deltas = await played(generation.choices)
    choices = [generation.form.whole(delta, generation.envelope) for delta in deltas]
    reply = generation.envelope.around(generation.form.kind, choices)
    if generation.envelope.with_ids:
        reply["prompt_token_ids"] = generation.prompt_ids
    completions = [delta.ended.completion for delta in deltas if delta.ended]
    sampled = sum(len(completion.token_ids) for completion in completions)
    return reply | {"usage": usage(len(generation.prompt_ids), sampled, completions[0].cached_tokens)}


async def stream_reply(generation: Generation, send: Send, *, with_usage: bool) -> None:
    """Sample every choice and send chunks as they come. What fails raises, after the usage that was asked for."""
    form, envelope = generation.form, generation.envelope
    chunk = partial(envelope.around, form.chunk_kind)
    first = {"prompt_token_ids": generation.prompt_ids} if envelope.with_ids else {}
    told: Counter[int] = Counter()
    cached = 0

    async def tell(delta: Delta) -> None:
        nonlocal first, cached
        opening = form.opening(delta.choice) if delta.choice not in told else None
        for choice in [*([opening] if opening else []), *form.chunk(delta, envelope)]:
            await send(event(chunk([choice]) | first))
            first = {}
        told[delta.choice] += len(delta.sampled.token_ids)
        cached = delta.ended.completion.cached_tokens if delta.ended else cached

    try:
        await played(generation.choices, tell)
    finally:
        if with_usage and told:
            await send(event(chunk([]) | {"usage": usage(len(generation.prompt_ids), told.total(), cached)}))
    await send(b"data: [DONE]\n\n")


async def played(choices: Sequence[Choice], tell: Callable[[Delta], Awaitable[None]] | None = None) -> list[Delta]:
    """The last delta of each; `tell` is given all deltas, one after the other."""
    last: dict[int, Delta] = {}
    failures: list[AgentrtError] = []
    lock = anyio.Lock()

    async def telling(delta: Delta) -> None:
        async with lock:
            assert tell is not None
            await tell(delta)

    async def play(choice: Choice, group: anyio.abc.TaskGroup) -> None:
        try:
            last[choice.index] = delta = await choice.play(telling if tell else None)
            if tell:
                await telling(delta)
        except AgentrtError as error:  # raised below, for a task group would wrap it
            failures.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for choice in choices:
            group.start_soon(play, choice, group)
    if failures:
        raise failures[0]
    return [last[choice.index] for choice in choices]


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encoded(data) + b"\n\n"
