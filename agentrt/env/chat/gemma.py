"""The format of Gemma 3: turns of user and model only.

The template knows neither system messages nor tools. The system text goes before the first question, as the template
does it; the tool list goes there too, in the words of Gemma's guide, and results come in a user turn.
"""

import json
from collections.abc import Sequence

from agentrt.env.chat.calls import python_list
from agentrt.env.chat.message import Message
from agentrt.env.chat.pieces import Pieces
from agentrt.env.chat.renderer import Family, ToolDescription, described

BEGIN, START, END = "<bos>", "<start_of_turn>", "<end_of_turn>"

_TOOLS = (
    "You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the format of\n"
    "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]\n\n"
    "You SHOULD NOT include any other text in the response if you call a function\n"
)


class Gemma3(Family):
    """Contents are stripped."""

    ends = (END,)
    controls = (BEGIN, START)
    calls = python_list.PYTHON
    after_turn = "\n"

    def _open(self, pieces: Pieces, messages: Sequence[Message], tools: Sequence[ToolDescription]) -> Sequence[Message]:
        pieces.control(BEGIN)
        prefix = ""
        if tools:
            listed = [described(tool)["function"] for tool in tools]
            prefix = _TOOLS + json.dumps(listed, ensure_ascii=False) + "\n\n"
        if messages and messages[0].role == "system":
            prefix, messages = messages[0].content + "\n\n" + prefix, messages[1:]
        if not prefix or not messages:
            return messages
        self._turn_of(pieces, "user", prefix + messages[0].content.strip())
        return messages[1:]

    def _write(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.role == "assistant":
                self._start_turn(pieces, ())
                self._write_turn(pieces, message)
                pieces.text("\n")
            else:
                self._turn_of(pieces, "user", message.content.strip())

    def _start_turn(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        pieces.control(START)
        pieces.text("model\n")

    def _write_turn(self, pieces: Pieces, message: Message) -> None:
        pieces.text(python_list.written(message.calls) if message.calls else message.content.strip())
        pieces.control(END)

    def _turn_of(self, pieces: Pieces, role: str, text: str) -> None:
        pieces.control(START)
        pieces.text(f"{role}\n{text}")
        pieces.control(END)
        pieces.text("\n")
