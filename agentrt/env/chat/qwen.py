"""The formats of the Qwen models, of SmolLM2 and of Hermes: ChatML with differences."""

import json
from collections.abc import Iterable, Sequence
from typing import ClassVar

from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat import reasoning
from agentrt.env.chat.calls import coder, hermes
from agentrt.env.chat.chatml import END, START, ChatML, write_reasoning
from agentrt.env.chat.message import Message, ToolCall
from agentrt.env.chat.pieces import Pieces
from agentrt.env.chat.renderer import ToolDescription, described, last_query

_EMPTY_BLOCK = "the template drops the empty reasoning block of the generation prompt"


class Qwen25(ChatML):
    """Qwen2.5: no reasoning, and a system turn of its own."""

    thinking = None
    default_system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


class SmolLM2(ChatML):
    """SmolLM2; its template knows no tools, so their list is written as for Qwen."""

    thinking = None
    default_system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Qwen3(ChatML):
    """Qwen3, the hybrid models; the ones of July 2025 (instruct) write the same without ever thinking."""

    def __init__(self, tokenizer: Tokenizer, *, enable_thinking: bool = True) -> None:
        super().__init__(tokenizer)
        self.enable_thinking = enable_thinking

    def rewrites(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolDescription] = ()
    ) -> str:
        """See `Renderer.rewrites`."""
        if not self.enable_thinking and any(message.role == "assistant" for message in history):
            return _EMPTY_BLOCK
        return super().rewrites(history, new, tools)

    def _start_turn(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        super()._start_turn(pieces, messages)
        if not self.enable_thinking:
            write_reasoning(pieces, "")


_CODER_AFTER = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n",
    "\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n",
    "\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified format: an inner <function=...></function> "
    "block must be nested within ",
    " XML tags\n- Required parameters MUST be specified\n- You may provide optional reasoning for your function call "
    "in natural language BEFORE the function call, but NOT after\n- If there is no function call available, answer the "
    "question like normal with your current knowledge and do not tell the user about function calls\n</IMPORTANT>",
)


class QwenCoder(ChatML):
    """Calls in the XML of Qwen3-Coder, with the tool list and the reasoning of Qwen3.6; contents are stripped.

    The prompt opens the reasoning block, or writes an empty one without `enable_thinking`.
    """

    calls = coder.CODER

    def __init__(self, tokenizer: Tokenizer, *, enable_thinking: bool = True) -> None:
        super().__init__(tokenizer)
        self.enable_thinking = self.thinks_at_once = enable_thinking

    def rewrites(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolDescription] = ()
    ) -> str:
        """See `Renderer.rewrites`."""
        turns = any(message.role == "assistant" for message in history[last_query(history) + 1 :])
        if turns and any(message.role == "user" for message in new):
            return "the template drops the reasoning block of turns before the last user message"
        return ""

    def _write_tools(self, pieces: Pieces, system: str, tools: Iterable[ToolDescription]) -> None:
        pieces.control(START)
        pieces.text("system\n# Tools\n\nYou have access to the following functions:\n\n<tools>")
        for tool in tools:
            pieces.text("\n" + json.dumps(described(tool), ensure_ascii=False))
        pieces.text(_CODER_AFTER[0])
        pieces.control(coder.OPEN)
        pieces.text(_CODER_AFTER[1])
        pieces.control(coder.CLOSE)
        pieces.text(_CODER_AFTER[2])
        pieces.control(coder.OPEN)
        pieces.control(coder.CLOSE)
        pieces.text(_CODER_AFTER[3])
        system = system.strip()
        pieces.text("\n\n" + system if system else "")
        pieces.control(END)
        pieces.text("\n")

    def _start_turn(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        super()._start_turn(pieces, messages)
        if self.enable_thinking:
            pieces.control(reasoning.THINK.open)
            pieces.text("\n")
        else:
            write_reasoning(pieces, "")

    def _write_turn(self, pieces: Pieces, message: Message) -> None:
        if self.enable_thinking:
            pieces.text(message.reasoning.strip() + "\n")
            pieces.control(reasoning.THINK.close)
            pieces.text("\n\n")
        self._write_body(pieces, message, with_reasoning=False)

    def _write_body(self, pieces: Pieces, message: Message, *, with_reasoning: bool) -> None:
        if with_reasoning and message.role == "assistant":
            write_reasoning(pieces, message.reasoning.strip())
        super()._write_body(pieces, message, with_reasoning=False)

    def _write_call(self, pieces: Pieces, call: ToolCall, *, after: str) -> None:
        pieces.text("\n" if after == "\n" else "\n\n" if after else "")
        pieces.control(coder.OPEN)
        pieces.text(f"\n{coder.FUNCTION}{call.name}>\n")
        for name, value in call.arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            pieces.text(f"{coder.PARAMETER}{name}>\n{text}\n{coder.END_PARAMETER}\n")
        pieces.text(f"{coder.END_FUNCTION}\n")
        pieces.control(coder.CLOSE)

    def _trimmed(self, content: str) -> str:
        return content.strip()


class Hermes(ChatML):
    """Hermes 2 Pro and 3: its own words for the tool list, and results in a turn of role tool."""

    thinking = None

    _WORDS: ClassVar[tuple[str, ...]] = (
        "You are a function calling AI model. You are provided with function signatures within <tools></tools> XML "
        "tags. You may call one or more functions to assist with the user query. Don't make assumptions about what "
        "values to plug into functions. Here are the available tools: <tools> ",
        " </tools>Use the following pydantic model json schema for each tool call you will make: "
        '{"properties": {"name": {"title": "Name", "type": "string"}, "arguments": {"title": "Arguments", "type": '
        '"object"}}, "required": ["name", "arguments"], "title": "FunctionCall", "type": "object"}}\n'
        "For each function call return a json object with function name and arguments within ",
        " XML tags as follows:\n",
        '\n{"name": <function-name>, "arguments": <args-dict>}\n',
    )

    def _write_tools(self, pieces: Pieces, system: str, tools: Iterable[ToolDescription]) -> None:
        listed = "\n".join(json.dumps(described(tool), ensure_ascii=False) for tool in tools)
        pieces.control(START)
        pieces.text("system\n" + self._WORDS[0] + listed + self._WORDS[1])
        pieces.control(hermes.OPEN)
        pieces.control(hermes.CLOSE)
        pieces.text(self._WORDS[2])
        pieces.control(hermes.OPEN)
        pieces.text(self._WORDS[3])
        pieces.control(hermes.CLOSE)
        pieces.control(END)
        pieces.text("\n")
        if system:
            super()._open(pieces, [Message("system", system)], ())

    def _write_results(self, pieces: Pieces, results: Iterable[Message]) -> None:
        pieces.control(START)
        pieces.text("tool")
        for result in results:
            pieces.text("\n")
            pieces.control("<tool_response>")
            pieces.text("\n" + result.content + "\n")
            pieces.control("</tool_response>")
        pieces.control(END)
        pieces.text("\n")
