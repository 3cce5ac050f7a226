"""ChatML with Hermes tool calls: the chat format of sprout, and the base of the Qwen and Hermes formats."""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby

from agentrt.env.chat import reasoning
from agentrt.env.chat.calls import hermes
from agentrt.env.chat.message import Message, ToolCall
from agentrt.env.chat.pieces import Pieces
from agentrt.env.chat.renderer import Family, ToolDescription, described, last_query, reasoning_is_dropped

START, END = "<|im_start|>", "<|im_end|>"

_TOOLS_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
_TOOLS_AFTER = "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
_CALL_SHAPE = '\n{"name": <function-name>, "arguments": <args-json-object>}\n'


class ChatML(Family):
    """Turns between `<|im_start|>` and `<|im_end|>`; tools in the system turn, results in a user turn."""

    ends = (END,)
    controls = (START,)
    thinking: reasoning.Markers | None = reasoning.THINK
    calls = hermes.HERMES
    after_turn = "\n"

    default_system = ""
    """What the system turn says if the conversation has none."""
    keeps_reasoning = False
    """Reasoning before the last user message is written too."""

    def rewrites(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolDescription] = ()
    ) -> str:
        """See `Renderer.rewrites`."""
        return "" if self.keeps_reasoning else reasoning_is_dropped(history, new)

    def _open(self, pieces: Pieces, messages: Sequence[Message], tools: Sequence[ToolDescription]) -> Sequence[Message]:
        has_system = bool(messages) and messages[0].role == "system"
        system = messages[0].content if has_system else self.default_system
        if tools:
            self._write_tools(pieces, system, tools)
        elif system or has_system:
            pieces.control(START)
            pieces.text("system\n" + self._trimmed(system))
            pieces.control(END)
            pieces.text("\n")
        return messages[1:] if has_system else messages

    def _write_tools(self, pieces: Pieces, system: str, tools: Iterable[ToolDescription]) -> None:
        """The system turn with the tool list, in the words that the Qwen models were trained with."""
        pieces.control(START)
        pieces.text("system\n" + (system + "\n\n" if system else "") + _TOOLS_BEFORE)
        for tool in tools:
            pieces.text("\n" + json.dumps(described(tool), ensure_ascii=False))
        pieces.text(_TOOLS_AFTER)
        pieces.control(hermes.OPEN)
        pieces.control(hermes.CLOSE)
        pieces.text(" XML tags:\n")
        pieces.control(hermes.OPEN)
        pieces.text(_CALL_SHAPE)
        pieces.control(hermes.CLOSE)
        pieces.control(END)
        pieces.text("\n")

    def _write(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        """Adjacent tool messages share one user turn; reasoning of turns before the last query is left out."""
        query = -1 if self.keeps_reasoning else last_query(messages)
        for is_tool, group in groupby(enumerate(messages), key=lambda item: item[1].role == "tool"):
            if is_tool:
                self._write_results(pieces, [message for _, message in group])
                continue
            for index, message in group:
                pieces.control(START)
                pieces.text(message.role + "\n")
                self._write_body(pieces, message, with_reasoning=index > query)
                pieces.text("\n")

    def _start_turn(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        pieces.control(START)
        pieces.text("assistant\n")

    def _write_turn(self, pieces: Pieces, message: Message) -> None:
        self._write_body(pieces, message, with_reasoning=True)

    def _write_body(self, pieces: Pieces, message: Message, *, with_reasoning: bool) -> None:
        if message.reasoning and with_reasoning and self.thinking:
            write_reasoning(pieces, message.reasoning)
        content = self._trimmed(message.content)
        pieces.text(content)
        for index, call in enumerate(message.calls):
            self._write_call(pieces, call, after="\n" if index else content)
        pieces.control(END)

    def _write_call(self, pieces: Pieces, call: ToolCall, *, after: str) -> None:
        """`after`: what stands before the call in its turn."""
        name, arguments = (json.dumps(part, ensure_ascii=False) for part in (call.name, call.arguments))
        pieces.text("\n" if after else "")
        pieces.control(hermes.OPEN)
        pieces.text(f'\n{{"name": {name}, "arguments": {arguments}}}\n')
        pieces.control(hermes.CLOSE)

    def _write_results(self, pieces: Pieces, results: Iterable[Message]) -> None:
        pieces.control(START)
        pieces.text("user")
        for result in results:
            pieces.text("\n")
            pieces.control("<tool_response>")
            pieces.text("\n" + self._trimmed(result.content) + "\n")
            pieces.control("</tool_response>")
        pieces.control(END)
        pieces.text("\n")

    def _trimmed(self, content: str) -> str:
        """The content as the template writes it; some strip it."""
        return content


def write_reasoning(pieces: Pieces, text: str) -> None:
    """A closed reasoning block and the blank line after it."""
    pieces.control(reasoning.THINK.open)
    pieces.text("\n" + text.strip("\n") + "\n")
    pieces.control(reasoning.THINK.close)
    pieces.text("\n\n")
