"""Messages, tools and calls between OpenAI's JSON and ours."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from agentrt.core import json
from agentrt.env.chat.message import Message, Role, ToolCall, Turn
from agentrt.serve.requests import BadRequest

T = TypeVar("T")

OWN_ID = "call_rt"
"""How the ids begin that are made here, for calls in formats that have none."""


class FunctionTool(msgspec.Struct, frozen=True):
    """A tool as a client describes it; `agentrt.env.chat.renderer.ToolDescription`."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object", "properties": {}})


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct, frozen=True):
    function: _Function
    id: str = ""


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class _Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class _Tool(msgspec.Struct, frozen=True):
    function: FunctionTool
    type: str = "function"


class ToolChoice(NamedTuple):
    """`tool_choice`: which calls of a turn are reported; `required` and `named` hold the turn to them."""

    kind: Literal["auto", "required", "none", "named"]
    name: str = ""


def to_messages(items: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The conversation that a client sent; `BadRequest` with the place of what is wrong."""
    if not items:
        raise BadRequest("messages is empty", param="messages")
    names: dict[str, str] = {}
    messages = []
    for index, item in enumerate(items):
        message = _message(_converted(item, _Message, f"messages[{index}]"), f"messages[{index}]", names)
        names.update((call.id, call.name) for call in message.calls)
        messages.append(msgspec.structs.replace(message, calls=tuple(map(_without_own_id, message.calls))))
    return tuple(messages)


def to_tools(items: Sequence[Mapping[str, Any]] | None) -> tuple[FunctionTool, ...]:
    """The tools that a client offers."""
    tools = tuple(_converted(item, _Tool, f"tools[{index}]").function for index, item in enumerate(items or ()))
    if len({tool.name for tool in tools}) != len(tools):
        raise BadRequest("tools: two functions have one name", param="tools")
    return tools


def to_choice(given: str | dict[str, Any] | None, tools: Sequence[FunctionTool]) -> ToolChoice:
    """`tool_choice` of a request; without tools there are no calls to report."""
    if isinstance(given, dict):
        name = given.get("function", {}).get("name", "") if isinstance(given.get("function"), dict) else ""
        if name not in [tool.name for tool in tools]:
            raise BadRequest(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
        return ToolChoice("named", name)
    if given in ("required", "none", "auto", None):
        kind: Any = given or ("auto" if tools else "none")
        if kind == "required" and not tools:
            raise BadRequest("tool_choice is 'required' and there are no tools", param="tool_choice")
        return ToolChoice(kind)
    raise BadRequest("tool_choice must be auto, none, required or a named function", param="tool_choice")


def from_turn(turn: Turn, call_ids: Sequence[str]) -> dict[str, Any]:
    """A turn as an assistant message for the client."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["content"] = turn.content or None
        message["tool_calls"] = [from_call(call, call_id) for call, call_id in zip(turn.calls, call_ids, strict=True)]
    return message


def from_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    """One call for the client; the arguments are JSON text."""
    arguments = msgspec.json.encode(call.arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def call_ids(turn: Turn, seed: int) -> list[str]:
    """An id for each call of a turn: the model's own, or one made of the turn's seed."""
    return [call.id or f"{OWN_ID}{seed:016x}{index:x}" for index, call in enumerate(turn.calls)]


def _message(item: _Message, place: str, names: Mapping[str, str]) -> Message:
    role: Role = "system" if item.role == "developer" else item.role
    content = item.content or ""
    if isinstance(content, list):
        other = next((part.type for part in content if part.type != "text"), None)
        if other is not None:
            raise BadRequest(f"{place}.content has a part of type {other!r}; only text is served", param="messages")
        content = "".join(part.text for part in content)
    calls = tuple(_call(call, f"{place}.tool_calls[{at}]") for at, call in enumerate(item.tool_calls or ()))
    call_id = item.tool_call_id or ""
    name = names.get(call_id, item.name or "") if role == "tool" else ""
    return Message(
        role, content, name=name, calls=calls, reasoning=item.reasoning_content or "",
        call_id="" if call_id.startswith(OWN_ID) else call_id,
    )  # fmt: skip


def _call(call: _Call, place: str) -> ToolCall:
    try:
        arguments = json.decode(call.function.arguments or "{}")
    except msgspec.DecodeError as error:
        raise BadRequest(f"{place}.function.arguments is not JSON: {error}", param="messages") from error
    if not isinstance(arguments, dict):
        raise BadRequest(f"{place}.function.arguments is not a JSON object", param="messages")
    return ToolCall(call.function.name, arguments, id=call.id)


def _without_own_id(call: ToolCall) -> ToolCall:
    return msgspec.structs.replace(call, id="") if call.id.startswith(OWN_ID) else call


def _converted(item: Mapping[str, Any], kind: type[T], place: str) -> T:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{place}: {error}", param=place.partition("[")[0]) from error
