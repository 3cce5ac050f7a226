"""Every call format: what is read, what is refused, types from the schema; and no text breaks it or dispatches a guess."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.env.chat.calls.coder import CODER
from agentrt.env.chat.calls.deepseek import DEEPSEEK
from agentrt.env.chat.calls.format import CallFormat
from agentrt.env.chat.calls.glm import GLM
from agentrt.env.chat.calls.hermes import HERMES
from agentrt.env.chat.calls.mistral import MISTRAL
from agentrt.env.chat.calls.python_list import PYTHON
from agentrt.env.chat.calls.whole import WHOLE
from agentrt.env.chat.message import ToolCall

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"}, "q": {"type": "string"}, "x": {"$ref": "#/$defs/point"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "any": {}, "mode": {"enum": [1, 2]},
    },
    "$defs": {"point": {"type": "object", "properties": {"at": {"type": "number"}}}},
}  # fmt: skip
SCHEMAS = {"search": SCHEMA, "now": {"type": "object", "properties": {}}}
TWO = (ToolCall("search", {"n": 2, "q": "a{b\nc"}), ToolCall("now"))

BOTH = {
    HERMES: '<tool_call>\n{"name": "search", "arguments": {"n": 2, "q": "a{b\\nc"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    CODER: "<tool_call>\n<function=search>\n<parameter=n>\n2\n</parameter>\n<parameter=q>\na{b\nc\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    GLM: "<tool_call>search\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n<arg_key>q</arg_key>\n"
    "<arg_value>a{b\nc</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    MISTRAL: '[TOOL_CALLS][{"name": "search", "arguments": {"n": 2, "q": "a{b\\nc"}}, '
    '{"name": "now", "arguments": {}}]',
    WHOLE: '{"name": "search", "parameters": {"n": 2, "q": "a{b\\nc"}}; {"name": "now", "parameters": {}}',
    PYTHON: '[search(n=2, q="a{b\\nc"), now()]',
    DEEPSEEK: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
    '{"n": 2, "q": "a{b\\nc"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}
FORMATS = {call_format.name: call_format for call_format in BOTH}


def parse(call_format: CallFormat, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    return call_format.parse(text, SCHEMAS)


def only(call_format: CallFormat, text: str) -> ToolCall:
    _, (call,) = parse(call_format, text)
    return call


@pytest.mark.parametrize("name", FORMATS)
def test_c08_two_calls_in_order(name: str) -> None:
    assert parse(FORMATS[name], BOTH[FORMATS[name]]) == ("", TWO)


@pytest.mark.parametrize("name", ["hermes", "coder", "glm", "mistral", "deepseek"])
def test_content_beside_calls_is_kept(name: str) -> None:
    assert parse(FORMATS[name], "Let me look. " + BOTH[FORMATS[name]]) == ("Let me look.", TWO)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["", "  4\n", "{}", '{"answer": 4}', "[1, 2]", "```\ncode\n```", "f(x) </tool_call>"])
def test_other_text_is_content_unchanged(name: str, text: str) -> None:
    assert parse(FORMATS[name], text) == (text, ())


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('[TOOL_CALLS]search[ARGS]{"n": 2}', ToolCall("search", {"n": 2})),
        ('[TOOL_CALLS]search[CALL_ID]abc[ARGS]{"n": 2}', ToolCall("search", {"n": 2}, id="abc")),
        ('[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "x1"}]', ToolCall("now", id="x1")),
        ("[TOOL_CALLS]now", ToolCall("", error="[TOOL_CALLS] is followed by neither a list nor NAME[ARGS]")),
        ("[TOOL_CALLS][ARGS]{}", ToolCall("", error="there is no name of a tool before [ARGS]")),
        ("[TOOL_CALLS][]", ToolCall("", error="the list after [TOOL_CALLS] is empty")),
    ],
)
def test_mistral(text: str, call: ToolCall) -> None:
    assert only(MISTRAL, text) == call


def test_deepseek_v31_writes_bare_json() -> None:
    text = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"n": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    assert only(DEEPSEEK, text) == ToolCall("search", {"n": 2})


def test_llama_after_the_python_tag() -> None:
    assert only(WHOLE, '<|python_tag|>{"name": "now", "parameters": {}}') == ToolCall("now")
    assert only(WHOLE, "<|python_tag|>print(1)").error.startswith("the call is not valid JSON: ")
    assert only(WHOLE, '[{"name": "now", "parameters": {}}]') == ToolCall("now")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[search(2)]", "arguments are written name=value, not by position"),
        ("[search(n=m)]", "the value of 'n' is not a literal that JSON has"),
        ("[search(n={1})]", "the value of 'n' is not a literal that JSON has"),
        ("[search(**a)]", "arguments are written name=value, not **"),
        ("[search(n=1e999)]", "the arguments hold a number that is not finite or too large"),
        (f"[search(n=0x{'f' * 4000})]", "the arguments hold a number of too many digits"),
        ("[search(n=1, n=2)]", "'n' is there twice, or a key in it is"),
        ("[search(n=[{'a': 1, 'a': 2}])]", "'n' is there twice, or a key in it is"),
        ("[search(n=1), 2]", "item at character 14 is not a call, name(argument=value)"),
        ("[search(n=1]", "the calls are not a Python list: "),
        ("[" + "search(n=" + "[" * 5000, "the calls are not a Python list: "),
    ],
)
def test_what_is_wrong_with_a_python_list(text: str, error: str) -> None:
    _, calls = parse(PYTHON, text)
    assert calls[-1].error.startswith(error)


def test_a_name_of_any_length_is_a_name() -> None:
    name = "a" + ".b" * 1500
    assert only(PYTHON, f"[{name}(x=1)]") == ToolCall(name, {"x": 1})


def test_python_values_are_those_of_json() -> None:
    text = "[search(a=(1, 'x'), b=None, c=True, d={'k': [1.5]}, e='\\d')]"
    assert only(PYTHON, text) == ToolCall(
        "search", {"a": [1, "x"], "b": None, "c": True, "d": {"k": [1.5]}, "e": "\\d"}
    )


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("n", "2", 2),
        ("n", str(2**70), 2**70),
        ("n", "1.5", "1.5"),
        ("n", "two", "two"),
        ("q", "2", "2"),
        ("q", " spaced\n\tout ", " spaced\n\tout "),
        ("q", '"quoted"', '"quoted"'),
        ("x", '{"at": 1e3}', {"at": 1000.0}),
        ("x", "{'at': 1}", "{'at': 1}"),
        ("either", "null", None),
        ("any", "2", "2"),
        ("mode", "2", 2),
        ("unknown", "2", "2"),
        ("q", "<tool_call></function> é", "<tool_call></function> é"),
    ],
)
def test_types_come_from_the_schema(key: str, text: str, value: Any) -> None:
    coder = f"<tool_call><function=search><parameter={key}>\n{text}\n</parameter></function></tool_call>"
    glm = f"<tool_call>search\n<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert only(CODER, coder) == only(GLM, glm) == ToolCall("search", {key: value})


@pytest.mark.parametrize("text", ["Infinity", "-1e999", "9" * 5000])
def test_what_is_no_number_is_not_measured_by_a_schema(text: str) -> None:
    schemas = {"f": {"type": "object", "properties": {"x": {"type": "number", "multipleOf": 0.5}}}}
    _, [call] = CODER.parse(
        f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>", schemas
    )  # fmt: skip
    assert call.error == "the arguments hold a number that is not finite or too large"


@pytest.mark.parametrize(
    ("call_format", "text", "error"),
    [
        (CODER, "<tool_call></tool_call>", "there is no <function=NAME> between <tool_call> and </tool_call>"),
        (CODER, "<tool_call>now</tool_call>", "the call does not start with <function=NAME>"),
        (CODER, "<tool_call><function=now", "<function= is not followed by the name of a tool and >"),
        (CODER, "<tool_call><function=now><parameter=a>1", "a parameter is not closed by </parameter> at character 27"),
        (CODER, "<tool_call><function=now>1</function>", "expected <parameter=KEY> or </function> at character 14"),
        (
            CODER,
            "<tool_call><function=now><parameter=a>1</parameter><parameter=a>1</parameter></function>",
            "the parameter 'a' is there twice",
        ),
        (GLM, "<tool_call></tool_call>", "the call names no tool"),
        (GLM, "<tool_call>now<arg_key>a</arg_key></tool_call>", "an <arg_key> without its <arg_value> at character"),
        (
            GLM,
            "<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>",
            "expected <arg_key> or </tool_c",
        ),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 1, "a": 2}}</tool_call>', 'the key "a" is there twice'),
        (
            HERMES,
            '<tool_call>{"name": "now", "arguments": {"a": 1, "a": 2}',
            "the arguments are not valid JSON: Expecting",
        ),
        (HERMES, '<tool_call>{"a": 1, "a": 2, "b": ' + "[" * 9000, "the call is nested too deeply"),
        (WHOLE, '{"name": "now", "parameters": {"a": 1,}}', "the arguments are not valid JSON: "),
        (WHOLE, '{"name": "now", "parameters": {"a": 1, "a": 2},', "the arguments are not valid JSON: "),
        (MISTRAL, '[TOOL_CALLS]now[ARGS]{"a": 1,}', "the arguments are not valid JSON: "),
        (MISTRAL, '[TOOL_CALLS]now[ARGS]{"b": {"a": 1, "a": 2}, ', "the arguments are not valid JSON: "),
        (MISTRAL, '[TOOL_CALLS]now[ARGS]{"a": 1, "a": 2, "b": ' + "[" * 9000, "the arguments are nested too deeply"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>x", "expected <｜tool▁call▁begin｜> or <｜tool▁calls▁end｜> after the calls"),
        (
            DEEPSEEK,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x",
            "there is no <｜tool▁sep｜> after <｜tool▁call▁begin｜>",
        ),
    ],
)
def test_c11_what_is_wrong_is_said_with_the_place(call_format: CallFormat, text: str, error: str) -> None:
    assert parse(call_format, text)[1][0].error.startswith(error)


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek", "coder", "glm"])
def test_c11_a_broken_call_leaves_the_one_after_it(name: str) -> None:
    both = BOTH[FORMATS[name]]
    broken = both.replace("2", "2 2", 1) if name in ("hermes", "mistral", "deepseek") else both.replace("search", "", 1)
    _, calls = parse(FORMATS[name], broken)
    assert calls[0].error
    if name != "mistral":  # a broken JSON array has no marks to go on at
        assert calls[-1] == ToolCall("now")


@pytest.mark.parametrize("name", ["hermes", "mistral", "whole", "deepseek"])
def test_exact_values(name: str) -> None:
    arguments = {"z": 2**200, "a": "  é🪿\u2028\r\n\t ", "s": "</tool_call>[TOOL_CALLS]```", "d": [{}, None, 0.1]}
    text = json.dumps(arguments, ensure_ascii=False)
    texts = {
        "hermes": f'<tool_call>{{"name": "now", "arguments": {text}}}</tool_call>',
        "mistral": f"[TOOL_CALLS]now[ARGS]{text}",
        "whole": f'{{"name": "now", "parameters": {text}}}',
        "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{text}<｜tool▁call▁end｜>",
    }
    call = only({**FORMATS, "whole": WHOLE}[name], texts[name])
    assert call == ToolCall("now", arguments)
    assert list(call.arguments) == list(arguments)


# --- mutated texts ------------------------------------------------------------------------------------------------------

SCRAPS = (
    "{",
    "}",
    '"',
    "\\",
    ",",
    ":",
    "[",
    "]",
    "(",
    ")",
    "\n",
    "\x00",
    "\ud800",
    "1e999",
    "NaN",
    "é",
    "'",
    "```",
    "</think>",
    '{"a": 1, "a": 2}',
)


def mutated(seed: int, count: int) -> Iterator[tuple[CallFormat, str]]:
    """Calls with characters dropped, doubled, moved and put in."""
    rng, texts = random.Random(seed), list(BOTH.items())
    for _ in range(count):
        call_format, text = rng.choice(texts)
        for _ in range(rng.randint(1, 4)):
            at, to = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
            match rng.randrange(4):
                case 0:
                    text = text[:at] + text[at + rng.randint(1, 6) :]
                case 1:
                    text = text[:at] + rng.choice((*SCRAPS, *call_format.opens)) + text[at:]
                case 2:
                    text = text[:to] + text[at:to] + text[to:]
                case 3:
                    text = text[:at]
            text = text or "x"
        yield call_format, text


def is_written(call: ToolCall, text: str, call_format: CallFormat) -> bool:
    """True if the text says the call: found without the parser, by looking for its arguments as one object or one by one."""
    if call_format is PYTHON:
        return f"{call.name}(" in "".join(text.split()) and all(key in text for key in call.arguments)
    if call_format in (CODER, GLM):
        values = [value for value in call.arguments.values() if isinstance(value, str) and value.isprintable()]
        return call.name in text and all(value.replace("\n", "\\n") in text or value in text for value in values)
    is_named = call.name in text or json.dumps(call.name)[1:-1] in text
    starts = [index for index, char in enumerate(text) if char == "{"]
    decoder = json.JSONDecoder()
    for start in starts:
        try:
            value, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if value == call.arguments or value.get("arguments", value.get("parameters")) == call.arguments:
            return is_named
    return not call.arguments and is_named


def test_c08_mutated_calls_break_nothing_and_dispatch_nothing_that_is_not_there() -> None:
    for call_format, text in mutated(seed=4, count=100_000):
        content, calls = parse(call_format, text)
        assert calls or content == text
        for call in calls:
            assert call.error or is_written(call, text, call_format), (call_format.name, text, call)


@given(st.sampled_from(list(FORMATS)), st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_can_be_parsed(name: str, text: str) -> None:
    call_format = FORMATS[name]
    for prefix in ("", *call_format.opens, *call_format.leads):
        _, calls = parse(call_format, prefix + text)
        assert all(call.error or call.name for call in calls)
