"""The format of gpt-oss against openai-harmony: the same text, with control tokens at the same places."""

import json
import os
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

import oracles
import pytest
from families import Case, Described, conversations, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.env.chat import typescript
from agentrt.env.chat.harmony import Harmony, read, visible
from agentrt.env.chat.message import Message, ToolCall

pytestmark = pytest.mark.filterwarnings("ignore")

SCHEMAS: tuple[dict[str, Any], ...] = (
    {},
    {"type": "object", "properties": {}},
    {
        "type": "object", "required": ["a"], "properties": {
            "a": {"type": "integer", "description": "first"}, "b": {"type": ["string", "null"]},
            "c": {"type": "array", "items": {"type": "number"}}, "d": {"type": "string", "enum": ["x", "y"], "default": "x"},
            "e": {"type": "object", "properties": {"z": {"type": "string", "description": "deep"}}},
            "f": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "g": {"type": "boolean", "default": True}, "h": {},
        },
    },
    {
        "type": "object", "properties": {
            "k": {"type": "number", "enum": [1, 2]}, "l": {"type": "string", "nullable": True, "title": "T"},
            "m": {"oneOf": [{"type": "string", "description": "one"}, {"type": "number"}], "default": 5},
            "n": {"type": "array"}, "o": {"type": "string", "examples": ["q"], "default": "v"}, "p": {"type": "null"},
        },
    },
)  # fmt: skip


@cache
def encoding() -> Any:
    harmony = oracles.library("openai_harmony")
    folder = oracles.folder() / "encodings"
    folder.mkdir(exist_ok=True)
    (folder / "o200k_base.tiktoken").write_bytes(oracles.o200k_file())
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


@cache
def chat() -> Harmony:
    return Harmony(vocabulary())


def spelt(token_ids: Sequence[int]) -> list[str]:
    """Our ids as text, control tokens apart."""
    controls = {token_id: marker for marker, token_id in vocabulary().special.items()}
    return _joined([controls.get(one, vocabulary().bytes_of(one)) for one in token_ids])


def _joined(parts: Sequence[str | bytes]) -> list[str]:
    """Runs of bytes put together to text."""
    groups = groupby(parts, key=lambda part: isinstance(part, bytes))
    texts = (
        [b"".join(part for part in group if isinstance(part, bytes)).decode()] if is_text else [*map(str, group)]
        for is_text, group in groups
    )
    return [part for text in texts for part in text]


def rendered(messages: Sequence[Message], tools: Sequence[Described]) -> list[str]:
    harmony = oracles.library("openai_harmony")
    role, made = harmony.Role, harmony.Message.from_role_and_content
    said = [made(role.SYSTEM, harmony.SystemContent.new())]
    instructions = [message.content for message in messages[:1] if message.role == "system"]
    if instructions or tools:
        developer = harmony.DeveloperContent.new()
        if instructions:
            developer = developer.with_instructions(instructions[0])
        if tools:
            listed = [harmony.ToolDescription.new(t.name, t.description, parameters=t.parameters) for t in tools]
            developer = developer.with_function_tools(listed)
        said.append(made(role.DEVELOPER, developer))
    for message in messages[len(instructions) :]:
        said += _said(message)
    conversation = harmony.Conversation.from_messages(said)
    ids = encoding().render_conversation_for_completion(conversation, role.ASSISTANT)
    special = {one: encoding().decode([one]) for one in set(ids) if encoding().is_special_token(one)}
    runs = groupby(ids, key=lambda one: one in special)
    texts = (
        [special[one] for one in run] if is_control else [encoding().decode(list(run))] for is_control, run in runs
    )
    return [part for text in texts for part in text]


def _said(message: Message) -> list[Any]:
    harmony = oracles.library("openai_harmony")
    role, made = harmony.Role, harmony.Message.from_role_and_content
    if message.role == "user":
        return [made(role.USER, message.content)]
    if message.role == "tool":
        author = harmony.Author.new(role.TOOL, f"functions.{message.name}")
        result = harmony.Message.from_author_and_content(author, message.content)
        return [result.with_channel("commentary").with_recipient("assistant")]
    parts = [made(role.ASSISTANT, message.reasoning).with_channel("analysis")] if message.reasoning else []
    if message.content or not message.calls:
        parts.append(made(role.ASSISTANT, message.content).with_channel("commentary" if message.calls else "final"))
    for call in message.calls:
        part = made(role.ASSISTANT, json.dumps(call.arguments, ensure_ascii=False)).with_channel("commentary")
        parts.append(part.with_recipient(f"functions.{call.name}").with_content_type("<|constrain|>json"))
    return parts


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_tools_are_listed_as_typescript(schema: dict[str, Any]) -> None:
    encoding()
    tools, question = [Described("add", "Adds.\nTwo lines.", schema), Described("now", "", {})], [Message("user", "Hi")]
    assert spelt(chat().prompt(question, tools)) == rendered(question, tools)


def test_a_schema_that_is_only_yes_or_no_is_any() -> None:
    """JSON Schema has them as properties; the tool list ended in a TypeError."""
    schema = {
        "type": "object",
        "properties": {"x": True, "y": {"oneOf": [True]}, "z": {"type": "array", "items": False}},
    }
    text = typescript.namespace("functions", [Described("add", "", schema)])
    assert "x?: any,\ny?:\n | any\n,\nz?: any[],\n" in text


def test_prompt_turns_and_joins_are_what_harmony_renders() -> None:
    encoding()
    case = Case("gpt-oss", Harmony, "", calls=1, reasoning=("never", "always"))

    @given(st.data())
    @settings(max_examples=40, deadline=None)
    def check(data: st.DataObject) -> None:
        opening, exchanges = data.draw(conversations(case))
        tools = [Described("add", "Adds.", SCHEMAS[2])] if data.draw(st.booleans()) else []
        ids, said = chat().prompt(opening, tools), list(opening)
        assert spelt(ids) == rendered(said, tools)
        for turn, answers in exchanges:
            reason = chat().rewrites([*said, turn], answers, tools)
            ids += chat().turn(turn) + chat().join(answers, ended=True)
            said += [turn, *answers]
            if reason:
                assert spelt(ids) != rendered(said, tools)
                assert spelt(chat().prompt(said, tools)) == rendered(said, tools)
                return
            assert spelt(ids) == rendered(said, tools)

    check()


TURN = "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TURN + "<|channel|>final<|message|>4", Message("assistant", "4", reasoning="Add.")),
        (
            TURN + '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}',
            Message("assistant", "", reasoning="Add.", calls=(ToolCall("add", {"a": 2}),)),
        ),
        (
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 2,}',
            Message("assistant", "", calls=(ToolCall("add", error="the arguments are not valid JSON"),)),
        ),
        (
            "<|channel|>commentary<|message|>Let me add.<|end|><|start|>assistant to=functions.now<|channel|>commentary "
            "json<|message|>{}",
            Message("assistant", "Let me add.", calls=(ToolCall("now"),)),
        ),
        ("4", Message("assistant", "4")),
    ],
)
def test_a_turn_is_read_by_channel(text: str, message: Message) -> None:
    read = chat().read(text, "stop", {}).message
    errors = [call.error for call in read.calls]
    assert [call.error for call in message.calls] == [error.partition(":")[0] for error in errors]
    plain = [ToolCall(call.name, call.arguments) for call in read.calls]
    assert (read.content, read.reasoning) == (message.content, message.reasoning)
    assert plain == [ToolCall(call.name, call.arguments) for call in message.calls]
    assert chat().read(text, "length", {}).calls == ()


def test_a_cut_turn_is_ended_by_end() -> None:
    special = chat().tokenizer.special
    question = [Message("user", "More.")]
    assert chat().join(question, ended=False) == [special["<|end|>"], *chat().join(question, ended=True)]


HARMONY = st.lists(
    st.sampled_from(
        ["<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|><|start|>assistant", "Hi", " there ",
        "<|", " to=functions.a", "<|channel|>commentary json<|message|>", "{}", "<|end|>", "<|start|>"]
    ),
    max_size=9,
).map("".join)  # fmt: skip


@given(HARMONY)
@settings(max_examples=400, deadline=None)
def test_what_was_shown_of_a_harmony_turn_is_how_it_starts(text: str) -> None:
    turn = read(text, "stop")
    before = ("", "")
    for at in range(len(text) + 1):
        shown = visible(text[:at])
        assert shown.reasoning.startswith(before[0])
        assert shown.content.startswith(before[1])
        before = shown
    assert turn.reasoning.startswith(before[0])
    assert turn.content.startswith(before[1])
