"""Turns that have to be tool calls: masked by the schemas, over a toy model that would say anything."""

import json
from typing import Any

import openai
import pytest
from standing import BYTES, standing

from agentrt.core.protocol import EngineInfo
from agentrt.core.spec import EngineSpec
from agentrt.engine.service import EngineService
from agentrt.engine.step import EngineCore
from agentrt.env.chat.calls.deepseek import DEEPSEEK
from agentrt.env.chat.chatml import ChatML
from agentrt.serve.grammar import CallGrammars
from agentrt.serve.messages import FunctionTool
from agentrt.serve.requests import BadRequest
from agentrt.testing.toy import ToyRunner, hashed_logits

SIZES = {
    "type": "object",
    "properties": {"deep": {"type": "boolean"}, "size": {"enum": ["x", "yz"]}},
    "required": ["deep", "size"],
    "additionalProperties": False,
}
DIG = FunctionTool("dig", parameters=SIZES)
REST = FunctionTool("rest", parameters={"type": "object", "properties": {}, "additionalProperties": False})
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in (DIG, REST)
]
VOCAB = BYTES.tokenizer.vocab_size


def spells(text: str, grammar: Any) -> bool:
    """Whether a turn may say `text` and end there, id by id."""
    ids = BYTES.tokenizer.encode(text)
    return all(grammar(ids[:at])[token_id] for at, token_id in enumerate(ids)) and bool(
        grammar(ids)[BYTES.stop_token_ids[0]]
    )


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_exactly_the_calls_of_the_schemas_can_be_said() -> None:
    grammars, right = CallGrammars(BYTES, VOCAB), call('{"name": "dig", "arguments": {"deep": true, "size": "yz"}}')
    several = grammars.of([DIG, REST], several=True)
    rest = call('{"name": "rest", "arguments": {}}')
    assert spells(right, several)
    assert spells(f"{right}\n{rest}\n{right}", several), "also after it was asked of another beginning"
    assert spells(f"<think>\nshall I?\n</think>\n\n{rest}", several)
    for wrong in (
        "", "Sure.", f"Sure. {right}", right[:-1], f"{right}.", "<think>\nno call\n</think>\n\n", right.replace("dig", "cut"),
        right.replace("true", "1"), right.replace("yz", "y"), right.replace(": true", ":true"), rest.replace("{}", '{"a": 1}'),
    ):  # fmt: skip
        assert not spells(wrong, several), wrong
    one = grammars.of([DIG], several=False)
    assert spells(right, one)
    assert not spells(f"{right}\n{right}", one)
    assert not spells(rest, one)


def test_the_engine_never_samples_a_control_token_inside_a_call() -> None:
    string = FunctionTool(
        "say", parameters={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    )
    grammar = CallGrammars(BYTES, VOCAB).of([string], several=False)
    mask = grammar(BYTES.tokenizer.encode('<tool_call>\n{"name": "say", "arguments": {"a": "b'))
    assert mask.shape == (VOCAB,)
    special = BYTES.tokenizer.special
    assert [name for name, token_id in special.items() if mask[token_id] and name.startswith("<|")] == []
    assert mask[ord("c")]


def test_what_makes_no_grammar_is_refused() -> None:
    class Other(ChatML):
        calls = DEEPSEEK

    with pytest.raises(BadRequest, match="writes calls as deepseek, and only hermes can be forced; use 'auto'"):
        CallGrammars(Other(BYTES.tokenizer), VOCAB).of([DIG], several=True)
    odd = FunctionTool("odd", parameters={"type": "object", "properties": {"a": {"type": "colour"}}, "required": ["a"]})
    with pytest.raises(BadRequest, match="no grammar can be made of the schemas"):
        CallGrammars(BYTES, VOCAB).of([odd], several=True)


def toy() -> EngineService:
    """A real engine over a toy model that says any id of the vocabulary."""
    runner = ToyRunner(hashed_logits(VOCAB), num_pages=2048, page_size=4)
    spec = EngineSpec(page_size=4, kv_tokens=4 * 2048, max_batch=16)
    core = EngineCore(runner, spec, vocab_size=VOCAB, bytes_of=BYTES.tokenizer.bytes_of)
    return EngineService(core, EngineInfo(model="toy", model_hash="", vocab_size=VOCAB, context_length=8192))


@pytest.mark.anyio
async def test_c57_required_and_named_calls_are_forced() -> None:
    ask: dict[str, Any] = {
        "model": "m", "messages": [{"role": "user", "content": "go"}], "tools": TOOLS, "max_tokens": 1500, "seed": 3,
    }  # fmt: skip
    named = {"type": "function", "function": {"name": "dig"}}
    async with toy() as engine, standing(engine) as up:
        create = up.client.chat.completions.create
        free = await create(**ask | {"max_tokens": 50})
        required = await create(**ask, tool_choice="required", n=3)
        single = await create(**ask, tool_choice="required", parallel_tool_calls=False)
        one = await create(**ask, tool_choice=named)
        pieces = [piece async for piece in await create(**ask, tool_choice=named, stream=True)]
        cut = await create(**ask | {"max_tokens": 9}, tool_choice="required")
        with pytest.raises(openai.BadRequestError, match="no grammar can be made"):
            await create(**ask | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}]},
                         tool_choice="required")  # fmt: skip
    engine.core.check()
    assert not free.choices[0].message.tool_calls
    for choice in required.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        for made in choice.message.tool_calls or []:
            arguments = json.loads(made.function.arguments)
            assert (made.function.name == "rest" and arguments == {}) or (
                set(arguments) == {"deep", "size"}
                and arguments["size"] in ("x", "yz")
                and type(arguments["deep"]) is bool
            )
    assert all(choice.message.tool_calls for choice in required.choices)
    assert (len(single.choices[0].message.tool_calls), single.choices[0].finish_reason) == (1, "tool_calls")
    [made] = one.choices[0].message.tool_calls
    assert (made.function.name, one.choices[0].finish_reason) == ("dig", "stop")
    streamed = [call for piece in pieces for call in (piece.choices[0].delta.tool_calls or [])]
    assert [(call.function.name, call.function.arguments) for call in streamed] == [("dig", made.function.arguments)]
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert (cut.choices[0].finish_reason, cut.choices[0].message.tool_calls) == ("length", None)
