"""The formats of Mistral's instruct models, by the version of their tokenizer: v3, v7, v11 and v13.

Up to v11 the tool list (in v3 the system text too) stands before the *last* user message, so a new question moves it.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat import reasoning
from agentrt.env.chat.calls import mistral
from agentrt.env.chat.message import Message, ToolCall
from agentrt.env.chat.pieces import Pieces
from agentrt.env.chat.renderer import Family, ToolDescription, described, last_query

Version = Literal[3, 7, 11, 13]
BEGIN, END = "<s>", "</s>"
INST, END_INST = "[INST]", "[/INST]"
TOOLS, END_TOOLS = "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"
RESULTS, END_RESULTS, CONTENT = "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]"
SYSTEM, END_SYSTEM = "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"


class Mistral(Family):
    """Questions between `[INST]` and `[/INST]`; the turn follows at once and ends with `</s>`."""

    ends = (END,)
    controls = (BEGIN, INST, END_INST)
    calls = mistral.MISTRAL
    thinking = reasoning.Markers("[THINK]", "[/THINK]")

    def __init__(self, tokenizer: Tokenizer, *, version: Version = 3) -> None:
        super().__init__(tokenizer)
        self.version = version

    def rewrites(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolDescription] = ()
    ) -> str:
        """See `Renderer.rewrites`."""
        if last_query(history) < 0 or last_query(new) < 0:
            return ""
        if tools and self.version < 13:
            return "the template moves the tool list before the last user message"
        if self.version == 3 and history[0].role == "system":
            return "the template moves the system text into the last user message"
        return ""

    def _open(self, pieces: Pieces, messages: Sequence[Message], tools: Sequence[ToolDescription]) -> Sequence[Message]:
        """Writes up to and with the user message that the tool list stands before."""
        pieces.control(BEGIN)
        system = ""
        if messages and messages[0].role == "system":
            system, messages = messages[0].content, messages[1:]
        if system and self.version > 3:
            self._between(pieces, SYSTEM, system, END_SYSTEM)
            system = ""
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        if not users:
            return messages
        at = users[0] if self.version == 13 else users[-1]
        self._write(pieces, messages[:at])
        if tools:
            self._between(pieces, TOOLS, json.dumps([*map(described, tools)], ensure_ascii=False), END_TOOLS)
        content = messages[at].content
        self._between(pieces, INST, f"{system}\n\n{content}" if system else content, END_INST)
        return messages[at + 1 :]

    def _write(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        for message in messages:
            match message.role:
                case "user":
                    self._between(pieces, INST, message.content, END_INST)
                case "system":
                    self._between(pieces, SYSTEM, message.content, END_SYSTEM)
                case "tool":
                    self._write_result(pieces, message)
                case "assistant":
                    self._write_turn(pieces, message)

    def _start_turn(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        """A turn follows without a mark."""

    def _write_turn(self, pieces: Pieces, message: Message) -> None:
        if message.reasoning:
            self._between(pieces, "[THINK]", message.reasoning, "[/THINK]")
        pieces.text(message.content.rstrip(" ") if self.version == 3 else message.content)
        if message.calls and self.version < 11:
            pieces.control(mistral.OPEN)
            pieces.text(json.dumps([*map(_call_object, message.calls)], ensure_ascii=False))
        elif message.calls:
            self._write_named(pieces, message.calls)
        pieces.control(END)

    def _write_named(self, pieces: Pieces, calls: Sequence[ToolCall]) -> None:
        for call in calls:
            pieces.control(mistral.OPEN)
            pieces.text(call.name)
            if call.id and self.version == 11:
                pieces.control(mistral.CALL_ID)
                pieces.text(call.id)
            pieces.control(mistral.ARGS)
            pieces.text(json.dumps(call.arguments, ensure_ascii=False))

    def _write_result(self, pieces: Pieces, message: Message) -> None:
        if self.version == 3:
            result = {"content": _json_or_text(message.content), "call_id": message.call_id}
            self._between(pieces, RESULTS, json.dumps(result, ensure_ascii=False), END_RESULTS)
            return
        pieces.control(RESULTS)
        if self.version < 13:
            pieces.text(message.call_id)
            pieces.control(CONTENT)
        pieces.text(message.content)
        pieces.control(END_RESULTS)

    def _between(self, pieces: Pieces, opening: str, text: str, closing: str) -> None:
        pieces.control(opening)
        pieces.text(text)
        pieces.control(closing)


def _call_object(call: ToolCall) -> dict[str, Any]:
    made: dict[str, Any] = {"name": call.name, "arguments": call.arguments}
    return made | {"id": call.id} if call.id else made


def _json_or_text(content: str) -> Any:
    """What v3 writes into the result: the value of a content that is JSON, else the text; an empty object for none."""
    try:
        return json.loads(content) if content else {}
    except (ValueError, RecursionError):
        return content
