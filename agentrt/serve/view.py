"""A turn as its client sees it: text that grows while the turn is sampled, and the calls at its end.

What is shown is how the finished turn starts. No half character is shown, and nothing of what may become a stop string
or a call; the ids and logprobs of a turn are whole in any case, also those that no text comes of.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from agentrt.core.detokenizer import Detokenizer
from agentrt.core.protocol import Completion
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.message import ToolCall, Turn
from agentrt.env.chat.renderer import Family
from agentrt.serve.messages import FunctionTool, ToolChoice

REASONS = {"stop": "stop", "length": "length"}


class Seen(NamedTuple):
    """What is new to see."""

    reasoning: str = ""
    content: str = ""


class View(Protocol):
    """One turn, while it is sampled and when it has ended."""

    def feed(self, token_ids: Sequence[int]) -> Seen:
        """Take sampled ids; what can be shown in addition to what was."""

    def finish(self, completion: Completion) -> tuple[Seen, Turn, str]:
        """The rest to show, the whole turn, and OpenAI's finish reason."""


class _Text:
    """The text of sampled ids so far, without ids that end the turn, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], stops: Sequence[str], *, keeps_stop: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer.bytes_of, stops, frozenset(end_ids))
        self._stops, self._keeps_stop = stops, keeps_stop
        self.text = ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """What can be shown after these ids."""
        self.text += self._detokenizer.feed(token_ids)
        return self.text

    def finish(self, matched: int | str | None) -> str:
        """The whole text of a turn that `matched` ended."""
        stop = matched if matched in self._stops else None  # one of ours, such as the end of a call, stays
        self.text += self._detokenizer.finish(stop, include_stop=self._keeps_stop)
        return self.text


class ChatView:
    """A chat turn: reasoning, content and calls. `choice` says which calls are reported, `parallel` how many."""

    def __init__(
        self,
        renderer: Family,
        tools: Sequence[FunctionTool],
        choice: ToolChoice,
        *,
        end_ids: Sequence[int],
        parallel: bool = True,
        stops: Sequence[str] = (),
        keeps_stop: bool = False,
    ) -> None:
        self._renderer, self._choice, self._parallel = renderer, choice, parallel
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._text = _Text(renderer.tokenizer, end_ids, stops, keeps_stop=keeps_stop)
        self._seen = Seen()

    def feed(self, token_ids: Sequence[int]) -> Seen:
        """See `View.feed`."""
        return self._more(*self._renderer.visible(self._text.feed(token_ids)))

    def finish(self, completion: Completion) -> tuple[Seen, Turn, str]:
        """See `View.finish`."""
        text = self._text.finish(completion.matched_stop)
        turn = self._renderer.read(text, completion.finish_reason, self._schemas)
        calls = self._reported(turn)
        if turn.calls and not calls:  # what is not reported as a call is text
            turn = self._renderer.read(text, "length", self._schemas)
        turn = msgspec.structs.replace(turn, calls=calls, finish_reason=completion.finish_reason)
        reason = REASONS[completion.finish_reason]
        if calls and self._choice.kind != "named":
            reason = "tool_calls"
        return self._more(turn.reasoning, turn.content), turn, reason

    def _reported(self, turn: Turn) -> tuple[ToolCall, ...]:
        """The calls that the client is told of; none if one of them cannot be read."""
        if self._choice.kind == "none" or any(call.error for call in turn.calls):
            return ()
        calls = tuple(call for call in turn.calls if self._choice.name in ("", call.name))
        return calls if self._parallel else calls[:1]

    def _more(self, reasoning: str, content: str) -> Seen:
        more = Seen(reasoning[len(self._seen.reasoning) :], content[len(self._seen.content) :])
        self._seen = Seen(reasoning, content)
        return more


class TextView:
    """A completion: text alone."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], stops: Sequence[str], *, keeps_stop: bool) -> None:
        self._text, self._shown = _Text(tokenizer, end_ids, stops, keeps_stop=keeps_stop), 0

    def feed(self, token_ids: Sequence[int]) -> Seen:
        """See `View.feed`."""
        return self._more(self._text.feed(token_ids))

    def finish(self, completion: Completion) -> tuple[Seen, Turn, str]:
        """See `View.finish`."""
        text = self._text.finish(completion.matched_stop)
        return (
            self._more(text),
            Turn(content=text, finish_reason=completion.finish_reason),
            REASONS[completion.finish_reason],
        )

    def _more(self, text: str) -> Seen:
        more, self._shown = Seen("", text[self._shown :]), len(text)
        return more
