"""Chat completions by OpenAI's own client: usage in streams (C56), tool calls (C57), ids and logprobs (C58)."""

import re
from typing import Any, NamedTuple

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk
from standing import BYTES, qwen, standing

from agentrt.testing.engine import Answer, ScriptedEngine

pytestmark = pytest.mark.anyio

END = BYTES.tokenizer.special["<|im_end|>"]
ASK: Any = [{"role": "user", "content": "2+3?"}]
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
MUL: Any = {"type": "function", "function": {"name": "mul", "parameters": {"type": "object"}}}
CALLS = [
    40, 686, 912, 624, 151657, 198, 4913, 606, 788, 330, 718, 497, 330, 16370, 788, 5212, 64, 788, 220, 17, 11, 330, 65, 788,
    220, 18, 11248, 151658, 151645,
]  # fmt: skip
"""`I will add.`, a newline, and a call of `add` with 2 and 3: 29 ids, of which 3 are control tokens."""


class Streamed(NamedTuple):
    """A stream, put together."""

    chunks: list[ChatCompletionChunk]
    content: str
    calls: list[Any]
    reason: str | None
    token_ids: list[int]
    pieces: list[str]


async def streamed(client: AsyncOpenAI, **request: Any) -> Streamed:
    chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **request)]
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == 0]
    pieces = [choice.delta.content or "" for choice in choices]
    return Streamed(
        chunks, "".join(pieces), [call for choice in choices for call in choice.delta.tool_calls or ()],
        next((choice.finish_reason for choice in choices if choice.finish_reason), None),
        [one for choice in choices for one in (choice.model_extra or {}).get("token_ids", ())], pieces,
    )  # fmt: skip


def ids_of(text: str) -> list[int]:
    """The ids of a turn; calls are between control tokens."""
    special = BYTES.tokenizer.special
    parts = re.split(r"(</?tool_call>)", text)
    return [one for part in parts for one in ([special[part]] if part in special else part.encode())] + [END]


def engine(*turns: Any, seconds: float = 0.0) -> ScriptedEngine:
    answers = [Answer(turn, seconds=seconds) for turn in turns]
    return ScriptedEngine(answers, vocab_size=152_000, decode=BYTES.tokenizer.decode)


async def test_c56_usage_comes_only_if_it_is_asked_for() -> None:
    async with standing(engine(CALLS, seconds=0.05), qwen()) as up:
        request: dict[str, Any] = {"model": "m", "messages": ASK, "tools": [ADD], "max_tokens": 100}
        whole = await up.client.chat.completions.create(**request)
        plain = await streamed(up.client, **request)
        counted = await streamed(up.client, **request, stream_options={"include_usage": True})
        cut = await streamed(up.client, **request | {"max_tokens": 5}, stream_options={"include_usage": True})
    assert all(chunk.choices and chunk.usage is None for chunk in plain.chunks)
    assert plain.chunks[-1].choices[0].finish_reason == "tool_calls"
    *earlier, last = counted.chunks
    assert last.choices == []
    assert all(chunk.choices and chunk.usage is None for chunk in earlier)
    assert earlier[-1].choices[0].finish_reason == "tool_calls"
    assert last.usage is not None
    assert whole.usage is not None
    prompt = whole.usage.prompt_tokens
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (
        prompt,
        29,
        prompt + 29,
    )
    assert last.usage == whole.usage
    assert cut.reason == "length"
    assert cut.chunks[-1].usage is not None
    assert cut.chunks[-1].usage.completion_tokens == 5


TWO = (
    'Both.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "mul", "arguments": {"b": 3}}\n</tool_call>'
)
FIRST = TWO[: TWO.index("</tool_call>") + len("</tool_call>")]
BOTH = [("add", '{"a":2}'), ("mul", '{"b":3}')]


@pytest.mark.parametrize(
    ("given", "text", "calls", "reason", "content"),
    [
        ({}, TWO, BOTH, "tool_calls", "Both."),
        ({"tool_choice": "required"}, TWO, BOTH, "tool_calls", "Both."),
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, TWO, BOTH[1:], "stop", "Both."),
        ({"tool_choice": "none"}, TWO, [], "stop", TWO),
        ({"parallel_tool_calls": False}, TWO, BOTH[:1], "tool_calls", "Both."),
        ({"tool_choice": "required"}, "No call.", [], "stop", "No call."),
        ({"max_tokens": 50}, TWO, [], "length", None),
        ({}, '<tool_call>\n{"name": "add", "argum\n</tool_call>', [], "stop", None),
    ],
    ids=["auto", "required", "named", "none", "one call", "required, no call", "cut", "broken call"],
)  # fmt: skip
async def test_c57_calls_and_finish_reasons(
    given: dict[str, Any], text: str, calls: list[tuple[str, str]], reason: str, content: str | None
) -> None:
    async with standing(engine(ids_of(text), seconds=0.02)) as up:
        request: dict[str, Any] = {"model": "m", "messages": ASK, "tools": [ADD, MUL]} | given
        reply = await up.client.chat.completions.create(**request, extra_body={"return_token_ids": True})
        stream = await streamed(up.client, **request, extra_body={"return_token_ids": True})
    [choice] = reply.choices
    functions = [call.function for call in choice.message.tool_calls or () if call.type == "function"]
    assert [(function.name, function.arguments) for function in functions] == calls
    assert (choice.message.tool_calls is None) == (not calls)
    assert choice.finish_reason == reason
    assert [(call.function.name, call.function.arguments) for call in stream.calls] == calls
    assert [call.index for call in stream.calls] == list(range(len(calls)))
    assert [call.id for call in stream.calls] != [""] * len(calls) or not calls
    assert stream.reason == reason
    assert stream.content == (choice.message.content or "")
    if content is not None:
        assert stream.content == content
    ids = (choice.model_extra or {})["token_ids"]
    assert stream.token_ids == ids
    if given.get("parallel_tool_calls") is False:
        assert BYTES.tokenizer.decode(ids) == FIRST, "the ids are what the client sees"


async def test_c58_all_ids_and_their_own_logprobs() -> None:
    logprobs = [-0.25 * (index % 7 + 1) for index in range(29)]
    script = ScriptedEngine([Answer(CALLS, logprobs, 0.05)], vocab_size=152_000)
    async with standing(script, qwen()) as up:
        request: dict[str, Any] = {"model": "m", "messages": ASK, "tools": [ADD], "logprobs": True}
        reply = await up.client.chat.completions.create(**request, extra_body={"return_token_ids": True})
        stream = await streamed(up.client, **request, extra_body={"return_token_ids": True})
    assert (reply.model_extra or {})["prompt_token_ids"] == list(script.requests[0].observed_ids)
    assert (stream.chunks[0].model_extra or {})["prompt_token_ids"] == list(script.requests[1].observed_ids)
    [choice] = reply.choices
    assert (choice.model_extra or {})["token_ids"] == CALLS
    assert stream.token_ids == CALLS
    assert choice.logprobs is not None
    assert [entry.logprob for entry in choice.logprobs.content or ()] == logprobs
    parts = [piece.choices[0].logprobs for piece in stream.chunks]
    assert [entry.logprob for part in parts if part for entry in part.content or ()] == logprobs
    assert choice.message.content == "I will add."
    assert stream.content == "I will add."


async def test_c58_half_characters_have_their_bytes_and_are_not_shown() -> None:
    async with standing(engine([13048, 11162, 103, 123, 0, 151645], seconds=0.1), qwen()) as up:
        request: dict[str, Any] = {"model": "m", "messages": ASK, "logprobs": True}
        reply = await up.client.chat.completions.create(**request)
        stream = await streamed(up.client, **request)
    assert reply.choices[0].logprobs is not None
    entries = reply.choices[0].logprobs.content or []
    assert [entry.bytes for entry in entries[:5]] == [[72, 105], [32, 240, 159], [170], [191], [33]]
    assert b"".join(bytes(entry.bytes or ()) for entry in entries[:5]).decode() == "Hi 🪿!"
    assert reply.choices[0].message.content == stream.content == "Hi 🪿!"
    assert not any("�" in piece for piece in stream.pieces)


@pytest.mark.parametrize(("keeps", "text"), [(False, "Action: search\n"), (True, "Action: search\nObservation:")])
async def test_c28_text_ends_at_the_stop_string_and_no_half_of_it_is_shown(keeps: bool, text: str) -> None:
    async with standing(engine(list(b"Action: search\nObservation: fake"), seconds=0.1)) as up:
        request: dict[str, Any] = {"model": "m", "messages": ASK, "stop": "Observation:"}
        extra = {"return_token_ids": True, "include_stop_str_in_output": keeps}
        reply = await up.client.chat.completions.create(**request, extra_body=extra)
        stream = await streamed(up.client, **request, extra_body=extra)
    assert reply.choices[0].message.content == stream.content == text
    assert stream.token_ids == list(b"Action: search\nObservation:"), "what completed the stop stays in the ids"
    assert stream.reason == "stop"


async def test_n_samples_differ_and_are_counted_together() -> None:
    script = ScriptedEngine(lambda ids: [*b"ab", END], vocab_size=512)
    async with standing(script) as up:
        reply = await up.client.chat.completions.create(model="m", messages=ASK, n=3, seed=7)
        stream = await streamed(up.client, model="m", messages=ASK, n=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 9
    assert {choice.index for chunk in stream.chunks for choice in chunk.choices} == {0, 1, 2}
    assert script.num_sessions == 0, "a session of a request was not left"


async def test_c58_the_sampled_id_has_its_logprob_also_where_it_is_not_among_the_likely_ones() -> None:
    async with standing(engine([97, 98, END])) as up:
        request: dict[str, Any] = {"model": "m", "messages": ASK, "logprobs": True, "top_logprobs": 2}
        reply = await up.client.chat.completions.create(**request)
        stream = await streamed(up.client, **request)
    assert reply.choices[0].logprobs is not None
    entries = reply.choices[0].logprobs.content or []
    assert [(entry.token, entry.logprob) for entry in entries[:2]] == [("a", -0.5), ("b", -0.5)]
    assert stream.content == "ab"
    parts = [chunk.choices[0].logprobs for chunk in stream.chunks]
    assert [entry for part in parts if part for entry in part.content or ()] == entries
