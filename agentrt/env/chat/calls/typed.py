"""Types of arguments that a format writes as bare text: from the tool's JSON schema, by the `jsonschema` library."""

from collections.abc import Mapping
from typing import Any

from agentrt.env.chat.calls import exact
from agentrt.env.chat.message import ToolCall
from agentrt.env.schema import validator


def typed_call(name: str, pairs: list[tuple[str, str]], parameters: Mapping[str, Any] | None) -> ToolCall:
    """The call with each text as the value that it stands for; a parameter that is there twice is an error."""
    arguments: dict[str, Any] = {}
    for key, text in pairs:
        if key in arguments:
            return ToolCall(name, error=f"the parameter {key!r} is there twice")
        arguments[key] = typed(text, key, parameters or {})
    return exact.checked(name, arguments)


def typed(text: str, name: str, parameters: Mapping[str, Any]) -> Any:
    """`text` itself where the schema of the parameter `name` admits it as a string, else the JSON value it spells.

    What fits neither way stays text: checking the call against the schema then says what is wrong. A parameter that the
    schema does not name is text. A value that cannot be passed on is for `exact.checked` to refuse, not for a schema.
    """
    schema = parameters.get("properties", {}).get(name)
    if schema is None or _admits(parameters, schema, text):
        return text
    try:
        value = exact.value_of(text)
    except (ValueError, RecursionError):
        return text
    return value if exact.refusal(value) or _admits(parameters, schema, value) else text


def _admits(parameters: Mapping[str, Any], schema: Any, value: Any) -> bool:
    return bool(validator(parameters).evolve(schema=schema).is_valid(value))
