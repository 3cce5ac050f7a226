"""The format of sprout, the small model that comes with agentrt: ChatML without a tool list."""

from collections.abc import Iterable

from agentrt.env.chat.chatml import END, START, ChatML
from agentrt.env.chat.pieces import Pieces
from agentrt.env.chat.renderer import ToolDescription

MARK = "<|sprout|>"
"""The control token that names this format."""


class Sprout(ChatML):
    """sprout knows the tools of its environments from training; their list would be most of its prompt."""

    thinking = None

    def _write_tools(self, pieces: Pieces, system: str, tools: Iterable[ToolDescription]) -> None:
        pieces.control(START)
        pieces.text("system\n" + system)
        pieces.control(END)
        pieces.text("\n")
