"""The format of GLM-4.5: role markers, and no end of a turn but the marker of who speaks next.

A turn ends when the model samples `<|user|>` or `<|observation|>`; what is appended then goes on after that marker.
"""

import json
from collections.abc import Sequence

from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat import reasoning
from agentrt.env.chat.calls import glm
from agentrt.env.chat.message import Message, ToolCall
from agentrt.env.chat.pieces import Pieces
from agentrt.env.chat.renderer import Family, ToolDescription, described, last_query, reasoning_is_dropped

ROLES = {"user": "<|user|>", "assistant": "<|assistant|>", "system": "<|system|>", "tool": "<|observation|>"}

_TOOLS_BEFORE = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_AFTER = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n",
    "{function-name}\n",
    "{arg-key-1}",
    "{arg-value-1}",
    "{arg-key-2}",
    "{arg-value-2}",
    "\n...\n",
)


class Glm45(Family):
    """Without `enable_thinking` questions end with `/nothink` and the prompt writes an empty reasoning block."""

    ends = (ROLES["user"], ROLES["tool"], "<|endoftext|>")
    controls = ("[gMASK]", "<sop>", *ROLES.values())
    thinking = reasoning.THINK
    calls = glm.GLM

    def __init__(self, tokenizer: Tokenizer, *, enable_thinking: bool = True) -> None:
        super().__init__(tokenizer)
        self.enable_thinking = enable_thinking

    def rewrites(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolDescription] = ()
    ) -> str:
        """See `Renderer.rewrites`."""
        return reasoning_is_dropped(history, new)

    def join(self, messages: Sequence[Message], *, ended: bool, end_id: int | None = None) -> list[int]:
        """See `Renderer.join`. An end id that is the marker of the first new message is not written again."""
        pieces = Pieces(self.tokenizer)
        self._write(pieces, messages)
        self._start_turn(pieces, messages)
        ids = pieces.ids()
        fits = messages and ended and ids[0] in self.stop_token_ids and end_id in (None, ids[0])
        return ids[1:] if fits else ids

    def _open(self, pieces: Pieces, messages: Sequence[Message], tools: Sequence[ToolDescription]) -> Sequence[Message]:
        pieces.control("[gMASK]")
        pieces.control("<sop>")
        if tools:
            pieces.control(ROLES["system"])
            listed = "".join(json.dumps(described(tool), ensure_ascii=False) + "\n" for tool in tools)
            pieces.text(_TOOLS_BEFORE + listed + _TOOLS_AFTER[0])
            pieces.control(glm.OPEN)
            pieces.text(_TOOLS_AFTER[1])
            for key, value in (_TOOLS_AFTER[2:4], _TOOLS_AFTER[4:6]):
                _write_pair(pieces, key, value)
                pieces.text("\n" if key == _TOOLS_AFTER[2] else _TOOLS_AFTER[6])
            pieces.control(glm.CLOSE)
        return messages

    def _write(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        query, before = last_query(messages), ""
        for index, message in enumerate(messages):
            if message.role != "tool" or before != "tool":
                pieces.control(ROLES[message.role])
            before = message.role
            if message.role == "assistant":
                self._write_said(pieces, message, message.reasoning if index > query else "")
            elif message.role == "tool":
                pieces.text("\n")
                pieces.control("<tool_response>")
                pieces.text(f"\n{message.content}\n")
                pieces.control("</tool_response>")
            else:
                pieces.text("\n" + message.content)
                if message.role == "user" and not self.enable_thinking and not message.content.endswith("/nothink"):
                    pieces.control("/nothink")

    def _start_turn(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        pieces.control(ROLES["assistant"])
        if not self.enable_thinking:
            self._write_reasoning(pieces, "")

    def _write_turn(self, pieces: Pieces, message: Message) -> None:
        if self.enable_thinking:
            self._write_reasoning(pieces, message.reasoning)
        self._write_answer(pieces, message)
        pieces.control(ROLES["tool" if message.calls else "user"])

    def _write_said(self, pieces: Pieces, message: Message, thought: str) -> None:
        self._write_reasoning(pieces, thought)
        self._write_answer(pieces, message)

    def _write_reasoning(self, pieces: Pieces, thought: str) -> None:
        pieces.text("\n")
        pieces.control(reasoning.THINK.open)
        pieces.text(thought.strip())
        pieces.control(reasoning.THINK.close)

    def _write_answer(self, pieces: Pieces, message: Message) -> None:
        content = message.content.strip()
        pieces.text("\n" + content if content else "")
        for call in message.calls:
            self._write_call(pieces, call)

    def _write_call(self, pieces: Pieces, call: ToolCall) -> None:
        pieces.text("\n")
        pieces.control(glm.OPEN)
        pieces.text(call.name + "\n")
        for name, value in call.arguments.items():
            _write_pair(pieces, name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            pieces.text("\n")
        pieces.control(glm.CLOSE)


def _write_pair(pieces: Pieces, key: str, value: str) -> None:
    pieces.control(glm.KEY)
    pieces.text(key)
    pieces.control(glm.END_KEY)
    pieces.text("\n")
    pieces.control(glm.VALUE)
    pieces.text(value)
    pieces.control(glm.END_VALUE)
