"""Decorated functions as tools: what they declare, and that they run in the sandbox on their own."""

from enum import Enum
from typing import Any, Literal

import anyio
import pytest

from agentrt import tool
from agentrt.core.errors import UsageError
from agentrt.env.tool import Tool
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox


@tool
def repeat(text: str, times: int = 2, case: Literal["up", "as it is"] = "as it is") -> str:
    """Say a text
    again and again."""
    import os

    assert "HOME" in os.environ
    return (text.upper() if case == "up" else text) * times


def run(called: Tool, arguments: dict[str, Any]) -> ToolResult:
    async def main() -> ToolResult:
        with Sandbox(Permits(1)) as sandbox:
            return await sandbox.call(called.argv, arguments, seconds=20, terms=called.terms)

    return anyio.run(main)


def test_the_declaration() -> None:
    assert (repeat.name, repeat.description) == ("repeat", "Say a text\nagain and again.")
    assert repeat.parameters == {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "times": {"type": "integer", "default": 2},
            "case": {"enum": ["as it is", "up"], "default": "as it is"},
        },
        "required": ["text"],
        "additionalProperties": False,
    }
    assert repeat.refusal({"times": 1}) == "arguments: 'text' is a required property"


def test_types_with_a_name_are_declared_beside_the_parameters() -> None:
    class Size(Enum):
        SMALL, LARGE = "small", "large"

    @tool
    def boxes(first: Size, others: list[Size], last: Size = Size.LARGE) -> str:
        """Stack boxes."""
        return f"{first} {others} {last}"

    assert boxes.parameters["properties"] == {
        "first": {"$ref": "#/$defs/Size"},
        "others": {"type": "array", "items": {"$ref": "#/$defs/Size"}},
        "last": {"$ref": "#/$defs/Size", "default": "large"},
    }
    assert boxes.parameters["$defs"] == {"Size": {"title": "Size", "enum": ["large", "small"]}}
    assert boxes.refusal({"first": "small", "others": ["large"]}) == ""
    assert boxes.refusal({"first": "small", "others": ["tiny"]}).startswith("arguments.others.0: 'tiny' is not one of")


@pytest.mark.parametrize(
    ("arguments", "outcome", "text"),
    [
        ({"text": "ab"}, "ok", "abab"),
        ({"text": "ab", "times": 3, "case": "up"}, "ok", "ABABAB"),
        ({"text": None}, "tool_error", "TypeError: unsupported operand type(s) for *: 'NoneType' and 'int'"),
    ],
)
def test_a_call(arguments: dict[str, Any], outcome: str, text: str) -> None:
    result = run(repeat, arguments)
    assert (result.outcome, result.text) == (outcome, text)


def test_what_is_no_text_comes_as_json() -> None:
    @tool
    def pair(a: int, *, b: list[float]) -> dict[str, Any]:
        """Two."""
        print("noise")
        return {"a": a, "b": b}

    assert run(pair, {"a": 1, "b": [0.5]}).text == '{"a":1,"b":[0.5]}'


def test_what_is_no_tool_is_refused() -> None:
    def silent(x: int) -> int:
        return x

    def untyped(x) -> int:  # type: ignore[no-untyped-def]
        """Say x."""
        return int(x)

    async def later(x: int) -> int:
        """Say x."""
        return x

    for function, words in ((silent, "needs a docstring"), (untyped, "parameter x"), (later, "an ordinary function")):
        with pytest.raises(UsageError, match=words):
            tool(function)
