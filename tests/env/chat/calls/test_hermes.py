"""Hermes calls: what is read, what is refused, and what the model is told."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.env.chat.calls.hermes import parse_calls
from agentrt.env.chat.message import ToolCall

MKDIR = '{"name": "mkdir", "arguments": {"cmd": "mkdir -p t/{a,b"}}'
LS = '{"name": "ls", "arguments": {"p": "t"}}'
BOTH = (ToolCall("mkdir", {"cmd": "mkdir -p t/{a,b"}), ToolCall("ls", {"p": "t"}))


def block(*objects: str) -> str:
    return "<tool_call>\n" + "\n".join(objects) + "\n</tool_call>"


def only(text: str) -> ToolCall:
    content, (call,) = parse_calls(text)
    assert content == ""
    return call


@pytest.mark.parametrize(
    "text",
    [
        block(MKDIR, LS),
        block(MKDIR) + "\n" + block(LS),
        block(MKDIR + LS),
        block(MKDIR) + block(LS).removesuffix("\n</tool_call>"),
    ],
    ids=["one-block", "two-blocks", "one-line", "last-block-open"],
)
def test_c08_two_calls_and_a_brace_in_a_string(text: str) -> None:
    assert parse_calls(text) == ("", BOTH)


def test_c11_good_unknown_and_malformed_calls_in_one_turn() -> None:
    text = block('{"name": "add", "arguments": {"a": 2, "b": 3}}')
    text += block('{"name": "serach", "arguments": {"q": "x"}}')
    text += block('{"name": "search", "arguments": {"q": "x",}}')
    content, (good, unknown, malformed) = parse_calls(text)
    assert content == ""
    assert good == ToolCall("add", {"a": 2, "b": 3})
    assert unknown == ToolCall("serach", {"q": "x"})
    assert (malformed.name, malformed.arguments) == ("search", {})
    # Python 3.13 points at the comma, earlier ones behind it.
    assert malformed.error.startswith("the arguments are not valid JSON: ")
    assert malformed.error.endswith(("at character 9", "at character 10"))


def test_c11_arguments_written_as_a_string_of_json() -> None:
    assert only(block('{"name": "search", "arguments": "{\\"q\\": 1}"}')) == ToolCall("search", {"q": 1})
    call = only(block('{"name": "search", "arguments": "{\\"q\\" 1}"}'))
    assert call == ToolCall("search", error="the arguments are not valid JSON: Expecting ':' delimiter at character 5")


def test_a_broken_call_leaves_its_neighbours() -> None:
    content, calls = parse_calls(f"first {block(LS, '{oops', MKDIR)} then {block(LS)} done")
    assert content == "first\nthen\ndone"
    assert [call.name for call in calls] == ["ls", "mkdir", "ls"]
    assert [bool(call.error) for call in calls] == [False, True, False]


def test_text_without_a_block_is_unchanged() -> None:
    assert parse_calls(' {"name": "ls"} </tool_call> \n') == (' {"name": "ls"} </tool_call> \n', ())


@pytest.mark.parametrize("text", ["<tool_call></tool_call>", "<tool_call>", "<tool_call>\n \n</tool_call>"])
def test_an_empty_block_is_a_call_with_an_error(text: str) -> None:
    assert only(text).error == "there is no JSON object between <tool_call> and </tool_call>"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("[1]", "a call is a JSON object with name and arguments, not an array"),
        ('"ls"', "a call is a JSON object with name and arguments, not a string"),
        ("{}", 'the call has no "name" of a tool'),
        ('{"name": 3}', 'the call has no "name" of a tool'),
        ('{"name": ""}', 'the call has no "name" of a tool'),
        ('{"name": "ls", "arguments": null}', "the arguments are a JSON object, not null"),
        ('{"name": "ls", "arguments": [1]}', "the arguments are a JSON object, not an array"),
        ('{"name": "ls", "arguments": true}', "the arguments are a JSON object, not a boolean"),
        ('{"name": "ls", "arguments": 5}', "the arguments are a JSON object, not a number"),
        ("ls t", "the call is not valid JSON: Expecting value at character 0"),
        ('{"name": "ls" "p"}', "the call is not valid JSON: Expecting ',' delimiter at character 14"),
    ],
)
def test_what_is_wrong_with_a_call(source: str, error: str) -> None:
    assert only(block(source)).error == error


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity", "9" * 5000])
def test_c51_numbers_that_cannot_be_passed_on_are_argument_errors(number: str) -> None:
    for arguments in (f'{{"x": {number}}}', f'{{"x": [{{"y": {number}}}]}}', json.dumps(f'{{"x": {number}}}')):
        call = only(block(f'{{"name": "add", "arguments": {arguments}}}'))
        assert call == ToolCall("add", error="the arguments hold a number that is not finite or too large")


def test_half_a_surrogate_pair_is_an_argument_error() -> None:
    call = only(block('{"name": "add", "arguments": {"x": "\\ud83e"}}'))
    assert call == ToolCall("add", error="the arguments hold half of a surrogate pair, which is no character")
    assert only(block('{"name": "add", "arguments": {"x": "\\ud83e\\udebf"}}')).arguments == {"x": "🪿"}


def test_depth_is_an_error_and_not_a_crash() -> None:
    for opening in ("[", '{"a":'):
        call = only(block('{"name": "add", "arguments": {"x": ' + opening * 100_000))
        assert call.error


def test_what_somebody_could_not_follow_is_nested_too_deeply() -> None:
    """Python's own limit depends on who asks: what could be read could not be checked by its schema, or written."""
    deep = '{"a":' * 98 + "[]" + "}" * 98
    assert only(block(f'{{"name": "add", "arguments": {{"x": {deep}}}}}')).error == ""
    deeper = ToolCall("add", error="the arguments are nested too deeply")
    for levels in (99, 500, 900):
        value = "[" * (levels + 1) + "]" * (levels + 1)
        assert only(block(f'{{"name": "add", "arguments": {{"x": {value}}}}}')) == deeper


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": 2**200},
        {"text": "  a\u2028b\r\n\t "},
        {"é": "🪿"},
        {"x": 0.1},
        {"s": "</tool_call><tool_call>"},
        {"deep": [[{}]]},
    ],
    ids=["big-int", "whitespace", "unicode", "float", "markers", "nested"],
)
def test_arguments_are_kept_exactly(arguments: dict[str, Any]) -> None:
    source = json.dumps({"name": "t", "arguments": arguments}, ensure_ascii=False)
    assert only(block(source)) == ToolCall("t", arguments)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(max_size=4), values, max_size=3), min_size=1, max_size=4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_calls_are_read_back(all_arguments: list[dict[str, Any]], one_block: bool) -> None:
    sources = [json.dumps({"name": "t", "arguments": arguments}) for arguments in all_arguments]
    text = block(*sources) if one_block else "\n".join(map(block, sources))
    assert parse_calls(text) == ("", tuple(ToolCall("t", arguments) for arguments in all_arguments))


PARTS = ("<tool_call>", "</tool_call>", '{"name": "a", ', '"arguments": {', "}", "}}", '"', "1e999", "\\", "[", "\n")


@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join))
@settings(max_examples=500, deadline=None)
def test_no_text_breaks_the_parser(text: str) -> None:
    content, calls = parse_calls(text)
    assert calls or content == text
    assert all(call.error or call.name for call in calls)
