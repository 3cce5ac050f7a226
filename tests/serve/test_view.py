"""A turn shown while it is sampled: however it is cut, it ends as the whole, and what was shown is how it starts."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentrt
from agentrt.core.protocol import Completion, FinishReason
from agentrt.core.tokenizer import Tokenizer
from agentrt.core.tokens import Floats, Ids
from agentrt.env.chat.calls.glm import GLM
from agentrt.env.chat.calls.mistral import MISTRAL
from agentrt.env.chat.calls.python_list import PYTHON
from agentrt.env.chat.calls.whole import WHOLE
from agentrt.env.chat.chatml import ChatML
from agentrt.env.chat.message import ToolCall, Turn
from agentrt.serve.messages import ToolChoice
from agentrt.serve.view import ChatView

SPROUT = Tokenizer.load(Path(agentrt.__file__).parent / "models" / "sprout")

C08 = (
    '<tool_call>\n{"name": "mkdir", "arguments": {"cmd": "mkdir -p t/{a,b"}}\n{"name": "ls", "arguments": {"p": "t"}}\n'
    "</tool_call>"
)
BOTH = (ToolCall("mkdir", {"cmd": "mkdir -p t/{a,b"}), ToolCall("ls", {"p": "t"}))
TEXTS = (
    C08,
    f"<think>\nShould I call <tool_call>?\n</think>\n\nYes — é🪿. {C08} Done.",
    "<think>never closed <tool_call>{}",
    "  4 < 5 and <tool is no marker\n\n",
    "",
)


class Whole(ChatML):
    calls = WHOLE


class Python(ChatML):
    calls = PYTHON


class Mistral(ChatML):
    calls = MISTRAL


class Glm(ChatML):
    calls = GLM


def view(chat: ChatML) -> ChatView:
    return ChatView(chat, (), ToolChoice("auto"), end_ids=chat.stop_token_ids)


def finished(stream: ChatView, reason: FinishReason) -> Turn:
    completion = Completion(
        token_ids=Ids(), logprobs=Floats(), versions=Ids(), finish_reason=reason, seed=0, context_tokens=0, cached_tokens=0
    )  # fmt: skip
    return stream.finish(completion)[1]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_c08_every_cut_gives_the_same_turn(text: str, finish_reason: FinishReason) -> None:
    chat, ids = ChatML(SPROUT), SPROUT.encode(text)
    stream = view(chat)
    stream.feed(ids)
    whole, parsed = finished(stream, finish_reason), chat.parse(ids, finish_reason)
    assert whole == parsed or any(call.error for call in parsed.calls), "a call that cannot be read is shown as text"
    cuts = [[ids[:at], ids[at:]] for at in range(len(ids) + 1)]
    for pieces in ([[one] for one in ids], [ids], *cuts):
        stream = view(chat)
        shown = [stream.feed(piece) for piece in pieces]
        assert finished(stream, finish_reason) == whole
        assert whole.reasoning.startswith("".join(part.reasoning for part in shown))
        assert whole.content.startswith("".join(part.content for part in shown))


def test_c08_the_calls_of_the_case() -> None:
    stream = view(ChatML(SPROUT))
    for one in SPROUT.encode(C08):
        assert stream.feed([one]) == ("", "")
    turn = finished(stream, "stop")
    assert (turn.calls, turn.content) == (BOTH, "")


def test_content_is_shown_at_once() -> None:
    stream = view(ChatML(SPROUT))
    shown = [stream.feed([one]).content for one in SPROUT.encode("The answer is 4.")]
    assert "".join(shown) == "The answer is 4."
    assert sum(bool(part) for part in shown) > 3


parts = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name": "a", "parameters": {}}',
        "[a(b=1)]", "[", "{", "<", "`", "```", " ", "\n", "Hi", "é", "<arg_key>", "<|python_tag|>"]
    ),
    max_size=8,
).map("".join)  # fmt: skip


@given(parts, st.sampled_from([ChatML, Whole, Python, Mistral, Glm]), st.sampled_from(["stop", "length"]), st.randoms())
@settings(max_examples=400, deadline=None)
def test_what_was_shown_is_how_the_turn_starts(
    text: str, family: type[ChatML], finish_reason: FinishReason, rng: random.Random
) -> None:
    chat = family(SPROUT)
    stream, ids = view(chat), SPROUT.encode(text)
    reasoning = content = ""
    while ids:
        size = rng.randint(1, 4)
        shown, ids = stream.feed(ids[:size]), ids[size:]
        reasoning, content = reasoning + shown.reasoning, content + shown.content
    turn = finished(stream, finish_reason)
    assert turn.reasoning.startswith(reasoning)
    assert turn.content.startswith(content)
