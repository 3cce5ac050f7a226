"""Mistral's format against mistral-common, id by id, for the tokenizer versions 3, 7, 11 and 13."""

import json
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import oracles
import pytest
from families import ADD, Case, Described, conversations
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.message import Message, ToolCall
from agentrt.env.chat.mistral import Mistral, Version

pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def encoder(version: Version) -> Any:
    """mistral-common's encoder."""
    oracles.library("tiktoken")
    sys.path.insert(0, str(oracles.folder() / "mistral_common"))
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    return MistralTokenizer.from_file(str(oracles.tekken_file(version)))


@cache
def vocabulary() -> Tokenizer:
    return Tokenizer(oracles.definition("tekken"))


def rendered(version: Version, messages: Sequence[Message], tools: Sequence[Described]) -> list[int]:
    from mistral_common.protocol.instruct import messages as said
    from mistral_common.protocol.instruct import tool_calls
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    def plain(message: Message) -> Any:
        match message.role:
            case "system":
                return said.SystemMessage(content=message.content)
            case "user":
                return said.UserMessage(content=message.content)
            case "tool":
                return said.ToolMessage(content=message.content, name=message.name, tool_call_id=message.call_id)
        calls = [
            tool_calls.ToolCall(
                id=call.id, function=tool_calls.FunctionCall(name=call.name, arguments=json.dumps(call.arguments))
            )
            for call in message.calls
        ]
        return said.AssistantMessage(content=message.content or None, tool_calls=calls or None)

    listed = [
        tool_calls.Tool(
            function=tool_calls.Function(name=tool.name, description=tool.description, parameters=tool.parameters)
        )
        for tool in tools
    ]
    request = ChatCompletionRequest(messages=[plain(message) for message in messages], tools=listed or None)
    return list(encoder(version).encode_chat_completion(request).tokens)


def with_ids(turn: Message, answers: Sequence[Message]) -> tuple[Message, list[Message]]:
    """The same exchange with nine-letter call ids, which Mistral's format needs."""
    calls = tuple(ToolCall(call.name, call.arguments, id=f"callid{n:03}") for n, call in enumerate(turn.calls))
    results = [
        Message("tool", answer.content, name=answer.name, call_id=f"callid{n:03}") if answer.role == "tool" else answer
        for n, answer in enumerate(answers)
    ]
    return Message("assistant", turn.content, calls=calls), results


@pytest.mark.parametrize("version", [3, 7, 11, 13])
def test_prompt_turns_and_joins_are_what_mistral_common_encodes(version: Version) -> None:
    case = Case("mistral", Mistral, "", said_with_calls=version > 3)
    chat = Mistral(vocabulary(), version=version)
    encoder(version)

    @given(st.data())
    @settings(max_examples=25, deadline=None)
    def check(data: st.DataObject) -> None:
        opening, exchanges = data.draw(conversations(case))
        tools = [ADD] if data.draw(st.booleans()) else []
        ids, said = chat.prompt(opening, tools), list(opening)
        assert ids == rendered(version, said, tools)
        for turn, answers in (with_ids(*exchange) for exchange in exchanges):
            reason = chat.rewrites([*said, turn], answers, tools)
            ids += chat.turn(turn) + chat.join(answers, ended=True)
            said += [turn, *answers]
            if reason:
                assert ids != rendered(version, said, tools)
                assert chat.prompt(said, tools) == rendered(version, said, tools)
                return
            assert ids == rendered(version, said, tools)

    check()
