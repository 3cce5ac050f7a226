"""The formats of Llama 3.1 and 3.2: calls as JSON, or as a Python list."""

import json
from collections.abc import Sequence

from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.calls import python_list, whole
from agentrt.env.chat.message import Message, ToolCall
from agentrt.env.chat.pieces import Pieces
from agentrt.env.chat.renderer import Family, ToolDescription, described

BEGIN, END = "<|begin_of_text|>", "<|eot_id|>"
START_HEADER, END_HEADER = "<|start_header_id|>", "<|end_header_id|>"
DATE = "26 Jul 2024"
"""What the template of Llama 3.1 says without a date; a fixed one keeps prompts the same from day to day."""

_JSON_CALLS = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)
_ASK_IN_USER_TURN = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    "answers the given prompt.\n\n"
)
_ASK_IN_SYSTEM_TURN = (
    "You have access to the following functions. To call a function, please respond with JSON for a function call."
)


class Llama3(Family):
    """Calls as JSON. Contents are stripped; a tool's result is written as a JSON string, as the template does."""

    ends = (END, "<|eom_id|>")
    controls = (BEGIN, START_HEADER, END_HEADER)
    calls = whole.WHOLE

    def __init__(self, tokenizer: Tokenizer, *, date: str = DATE, tools_in_user_message: bool = True) -> None:
        super().__init__(tokenizer)
        self.date, self.tools_in_user_message = date, tools_in_user_message

    def _open(self, pieces: Pieces, messages: Sequence[Message], tools: Sequence[ToolDescription]) -> Sequence[Message]:
        has_system = bool(messages) and messages[0].role == "system"
        system, messages = messages[0].content.strip() if has_system else "", messages[1 if has_system else 0 :]
        pieces.control(BEGIN)
        self._header(pieces, "system")
        pieces.text("Environment: ipython\n" if tools else "")
        pieces.text(f"Cutting Knowledge Date: December 2023\nToday Date: {self.date}\n\n")
        listed = "".join(json.dumps(described(tool), ensure_ascii=False, indent=4) + "\n\n" for tool in tools)
        if tools and not self.tools_in_user_message:
            pieces.text(_ASK_IN_SYSTEM_TURN + _JSON_CALLS + listed)
        pieces.text(system)
        pieces.control(END)
        if tools and self.tools_in_user_message and messages:
            self._header(pieces, "user")
            pieces.text(_ASK_IN_USER_TURN + _JSON_CALLS + listed + messages[0].content.strip())
            pieces.control(END)
            messages = messages[1:]
        return messages

    def _write(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        for message in messages:
            self._header(pieces, "ipython" if message.role == "tool" else message.role)
            if message.role == "tool":
                pieces.text(json.dumps(message.content, ensure_ascii=False))
                pieces.control(END)
            else:
                self._write_turn(pieces, message)

    def _start_turn(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        self._header(pieces, "assistant")

    def _write_turn(self, pieces: Pieces, message: Message) -> None:
        pieces.text(self._calls_text(message.calls) if message.calls else message.content.strip())
        pieces.control(END)

    def _calls_text(self, calls: Sequence[ToolCall]) -> str:
        """One call as the template has it; several one after the other."""
        return "; ".join(map(_json_call, calls))

    def _header(self, pieces: Pieces, role: str) -> None:
        pieces.control(START_HEADER)
        pieces.text(role)
        pieces.control(END_HEADER)
        pieces.text("\n\n")


def _json_call(call: ToolCall) -> str:
    return f'{{"name": "{call.name}", "parameters": {json.dumps(call.arguments, ensure_ascii=False)}}}'


class Llama3Python(Llama3):
    """Calls as a Python list, as the guide of Llama 3.2 shows; the system turn lists the tools and nothing else."""

    calls = python_list.PYTHON

    _WORDS = (
        "You are an expert in composing functions. You are given a question and a set of possible functions.\n"
        "Based on the question, you will need to make one or more function/tool calls to achieve the purpose.\n"
        "If none of the function can be used, point it out. If the given question lacks the parameters required by the "
        "function,\nalso point it out. You should only return the function call in tools call sections.\n\n"
        "If you decide to invoke any of the function(s), you MUST put it in the format of "
        "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]\n"
        "You SHOULD NOT include any other text in the response.\n\n"
        "Here is a list of functions in JSON format that you can invoke.\n\n"
    )

    def _open(self, pieces: Pieces, messages: Sequence[Message], tools: Sequence[ToolDescription]) -> Sequence[Message]:
        if not tools:
            return super()._open(pieces, messages, tools)
        has_system = bool(messages) and messages[0].role == "system"
        pieces.control(BEGIN)
        self._header(pieces, "system")
        listed = [described(tool)["function"] for tool in tools]
        pieces.text(self._WORDS + json.dumps(listed, ensure_ascii=False, indent=4))
        pieces.text("\n\n" + messages[0].content.strip() if has_system else "")
        pieces.control(END)
        return messages[1 if has_system else 0 :]

    def _calls_text(self, calls: Sequence[ToolCall]) -> str:
        return python_list.written(calls)
