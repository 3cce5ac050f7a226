"""The format of DeepSeek-V3 and R1: no line breaks, a marker before each part.

The template does not list tools; their list goes into the system text, in our words.
"""

import json
from collections.abc import Sequence
from itertools import groupby

from agentrt.core.errors import UsageError
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat import reasoning
from agentrt.env.chat.calls import deepseek
from agentrt.env.chat.message import Message
from agentrt.env.chat.pieces import Pieces
from agentrt.env.chat.renderer import Family, ToolDescription, described

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
RESULTS, END_RESULTS = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
RESULT, END_RESULT = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"


class DeepSeekV3(Family):
    """With `enable_thinking` (R1) the prompt opens the reasoning block, except after tool results."""

    ends = (END,)
    controls = (BEGIN, USER, ASSISTANT)
    thinking = reasoning.THINK
    calls = deepseek.DEEPSEEK

    def __init__(self, tokenizer: Tokenizer, *, enable_thinking: bool = False) -> None:
        super().__init__(tokenizer)
        self.thinks_at_once = enable_thinking

    def rewrites(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolDescription] = ()
    ) -> str:
        """See `Renderer.rewrites`."""
        if any(message.role == "system" for message in new):
            return "the template moves system messages to the front"
        if self.thinks_at_once and any(message.role == "assistant" for message in history):
            return "the template drops the reasoning of all earlier turns"
        if any(message.reasoning for message in history):
            return "the template drops the reasoning of all earlier turns"
        if sum(bool(message.calls) for message in history) > 1:
            return "the template leaves out markers from the second round of tool calls on"
        return ""

    def _open(self, pieces: Pieces, messages: Sequence[Message], tools: Sequence[ToolDescription]) -> Sequence[Message]:
        texts = [message.content for message in messages if message.role == "system"]
        if tools:
            listed = "\n".join(json.dumps(described(tool)["function"], ensure_ascii=False) for tool in tools)
            texts.append(f"## Tools\nYou have access to the following tools:\n{listed}")
        pieces.control(BEGIN)
        pieces.text("\n\n".join(texts))
        return [message for message in messages if message.role != "system"]

    def _write(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        after_results = False
        for is_tool, group in groupby(messages, key=lambda message: message.role == "tool"):
            if is_tool:
                self._write_results(pieces, list(group))
                after_results = True
                continue
            for message in group:
                if message.role == "system":
                    raise UsageError("DeepSeek-V3 has no system message inside a conversation; send a user message")
                if message.role == "user":
                    pieces.control(USER)
                    pieces.text(message.content)
                else:
                    if not after_results:
                        pieces.control(ASSISTANT)
                    self._write_said(pieces, message)
                after_results = False

    def _write_results(self, pieces: Pieces, results: Sequence[Message]) -> None:
        pieces.control(RESULTS)
        for result in results:
            pieces.control(RESULT)
            pieces.text(result.content)
            pieces.control(END_RESULT)
        pieces.control(END_RESULTS)

    def _start_turn(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        if messages and messages[-1].role == "tool":
            return
        pieces.control(ASSISTANT)
        if self.thinks_at_once:
            pieces.control(reasoning.THINK.open)
            pieces.text("\n")

    def _write_turn(self, pieces: Pieces, message: Message) -> None:
        if message.reasoning or self.thinks_at_once:
            if not self.thinks_at_once:
                pieces.control(reasoning.THINK.open)
                pieces.text("\n")
            pieces.text(message.reasoning + "\n")
            pieces.control(reasoning.THINK.close)
            pieces.text("\n\n")
        self._write_said(pieces, message)

    def _write_said(self, pieces: Pieces, message: Message) -> None:
        pieces.text(message.content)
        for index, call in enumerate(message.calls):
            if index == 0:
                pieces.control(deepseek.OPEN)
            pieces.text("\n" if index else "")
            pieces.control(deepseek.CALL)
            pieces.text("function")
            pieces.control(deepseek.SEPARATOR)
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            pieces.text(f"{call.name}\n{deepseek.FENCE}\n{arguments}\n{deepseek.END_FENCE}")
            pieces.control(deepseek.END_CALL)
        if message.calls:
            pieces.control(deepseek.CLOSE)
        pieces.control(END)
