"""`TurnStream`: shows a turn while it is sampled.

What is shown is only looked at, never acted on: calls are read once, by `finish`, from the whole text. So however the
ids arrive, the turn is the same one that `Renderer.parse` gives, and what was shown is how it starts.
"""

from collections.abc import Sequence

from agentrt.core.detokenizer import Detokenizer
from agentrt.core.protocol import FinishReason
from agentrt.env.chat.message import Turn
from agentrt.env.chat.renderer import Family, Shown, ToolDescription


class TurnStream:
    """One turn. A piece costs time in proportion to the turn so far, not to the conversation."""

    def __init__(self, renderer: Family, tools: Sequence[ToolDescription] = ()) -> None:
        self._renderer, self._tools = renderer, tools
        self._token_ids: list[int] = []
        self._text = ""
        self._detokenizer = Detokenizer(renderer.tokenizer.bytes_of, skip=renderer.stop_token_ids)
        self._shown = Shown("", "")

    def feed(self, token_ids: Sequence[int]) -> Shown:
        """Take sampled ids; returns what can be shown in addition to what was."""
        self._token_ids += token_ids
        self._text += self._detokenizer.feed(token_ids)
        before, self._shown = self._shown, self._renderer.visible(self._text)
        return Shown(
            self._shown.reasoning[len(before.reasoning) :], self._shown.content[len(before.content) :]
        )  # fmt: skip

    def finish(self, finish_reason: FinishReason) -> Turn:
        """The whole turn, parsed."""
        return self._renderer.parse(self._token_ids, finish_reason, self._tools)
