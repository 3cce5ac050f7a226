"""`Renderer`: what turns messages into ids and sampled ids into a turn; `Family`: what the families' renderers share.

A conversation is appended to, never rendered again: `prompt` opens a branch, `join` gives what comes between a sampled
turn and the next one, `parse` reads a sampled turn. As long as no rule of the model's template rewrites history, prompt
+ sampled ids + joins are, id by id, what encoding the whole conversation at once would give; `rewrites` names the rule
that would. A renderer holds no conversation, so one object serves all.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from agentrt.core.errors import UsageError
from agentrt.core.protocol import FinishReason
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat import reasoning
from agentrt.env.chat.calls.format import NONE, CallFormat, Schemas
from agentrt.env.chat.message import Message, ToolCall, Turn
from agentrt.env.chat.pieces import Pieces


class ToolDescription(Protocol):
    """What the model is told of a tool."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""


class Shown(NamedTuple):
    """What of an unfinished turn may be shown: whatever is sampled next, the finished turn starts with it."""

    reasoning: str
    content: str


class Renderer(Protocol):
    """One chat format over one vocabulary."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolDescription] = ()) -> Sequence[int]:
        """The opening of a branch: the tools, the messages, and the start of the model's turn."""

    def join(self, messages: Sequence[Message], *, ended: bool, end_id: int | None = None) -> Sequence[int]:
        """What to append after a sampled turn: its ending, the new messages, and the start of the next turn.

        `ended`: the last sampled id was one of `stop_token_ids`, namely `end_id` (without it, the one that fits). Else
        the turn was cut, by its length or by a stop string, and its end id is added here, as an observed id.
        """

    def turn(self, message: Message) -> list[int]:
        """The ids of an assistant message as a policy that follows the format would sample them, the end id included.

        For teachers and scripted policies; what a policy did sample is never encoded again.
        """

    def parse(
        self, token_ids: Sequence[int], finish_reason: FinishReason, tools: Sequence[ToolDescription] = ()
    ) -> Turn:
        """A sampled turn as reasoning, content and calls. Reasoning goes first: a call drafted in it is not a call.

        A turn that did not end by itself has no calls; its text stays in the content. `tools` give the types of
        arguments that a format writes as bare text.
        """

    def visible(self, text: str) -> Shown:
        """What may be shown of a turn of which `text` was sampled so far."""

    def rewrites(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolDescription] = ()
    ) -> str:
        """The rule by which the model's own template would change the ids of `history` once `new` follows, or empty.

        Appending keeps them. Who wants what the template says opens a new branch with `prompt([*history, *new])`.
        """


class Family:
    """The renderer of a model family: subclasses say how messages are written (`_write`) and the rest follows."""

    ends: tuple[str, ...]
    """Control tokens that end a turn."""
    cut_end: str = ""
    """What the runtime ends a cut turn with; by default the first of `ends`."""
    controls: tuple[str, ...]
    """Control tokens that a vocabulary must have for this format."""
    thinking: reasoning.Markers | None = None
    calls: CallFormat = NONE
    after_turn: str = ""
    """Template text between the end token and the next message."""
    thinks_at_once = False
    """The prompt opens the reasoning already."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        missing = [marker for marker in (*self.controls, self.ends[0]) if marker not in tokenizer.special]
        if missing:
            raise UsageError(
                f"the tokenizer has no control token {' and no '.join(missing)}; "
                f"the {type(self).__name__} format needs a chat model trained with it"
            )
        self.tokenizer = tokenizer
        self.stop_token_ids = tuple(tokenizer.special[end] for end in self.ends if end in tokenizer.special)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolDescription] = ()) -> list[int]:
        """See `Renderer.prompt`."""
        pieces = Pieces(self.tokenizer)
        messages = self._open(pieces, messages, tools)
        self._write(pieces, messages)
        self._start_turn(pieces, messages)
        return pieces.ids()

    def join(self, messages: Sequence[Message], *, ended: bool, end_id: int | None = None) -> list[int]:
        """See `Renderer.join`."""
        pieces = Pieces(self.tokenizer)
        if not ended:
            pieces.control(self.cut_end or self.ends[0])
        pieces.text(self.after_turn)
        self._write(pieces, messages)
        self._start_turn(pieces, messages)
        return pieces.ids()

    def turn(self, message: Message) -> list[int]:
        """See `Renderer.turn`."""
        pieces = Pieces(self.tokenizer)
        self._write_turn(pieces, message)
        return pieces.ids()

    def parse(
        self, token_ids: Sequence[int], finish_reason: FinishReason, tools: Sequence[ToolDescription] = ()
    ) -> Turn:
        """See `Renderer.parse`."""
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        text = self.tokenizer.decode(token_ids[:-1] if ended else token_ids)
        return self.read(text, finish_reason, {tool.name: tool.parameters for tool in tools})

    def read(self, text: str, finish_reason: FinishReason, schemas: Schemas) -> Turn:
        """A turn's text as `parse` gives it, without the end token."""
        thought, content, closed = reasoning.split(text, self.thinking, opened=self.thinks_at_once)
        calls: tuple[ToolCall, ...] = ()
        drafted = 0
        if finish_reason == "stop":
            content, calls = self.calls.parse(content, schemas)
            if not closed and self.thinking and any(marker in thought for marker in self.calls.opens):
                opening, closing = self.thinking
                calls = (ToolCall("", error=f"a call inside {opening} is not run; write {closing} before it"),)
                drafted = 1
        return Turn(
            content=content, reasoning=thought, calls=calls, finish_reason=finish_reason, tool_call_in_reasoning=drafted
        )

    def visible(self, text: str) -> Shown:
        """See `Renderer.visible`."""
        return visible(text, self.thinking, self.calls, opened=self.thinks_at_once)

    def rewrites(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolDescription] = ()
    ) -> str:
        """See `Renderer.rewrites`."""
        return ""

    def _open(self, pieces: Pieces, messages: Sequence[Message], tools: Sequence[ToolDescription]) -> Sequence[Message]:
        """Write what a conversation begins with; returns the messages that are left to write."""
        raise NotImplementedError

    def _write(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        """Write whole messages."""
        raise NotImplementedError

    def _start_turn(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        """Write the start of the model's turn, after `messages`."""
        raise NotImplementedError

    def _write_turn(self, pieces: Pieces, message: Message) -> None:
        """Write an assistant message from the start of its turn up to and with the end token."""
        raise NotImplementedError


def visible(text: str, thinking: reasoning.Markers | None, calls: CallFormat, *, opened: bool) -> Shown:
    """What may be shown of a turn of which `text` was sampled so far; see `Shown`."""
    if thinking and not opened and thinking.open.startswith(text.strip()):
        return Shown("", "")
    thought, content, closed = reasoning.split(text, thinking, opened=opened)
    if thinking and not closed:
        return Shown(thought[: settled(thought, (thinking.close,))].rstrip(), "")
    start = content.lstrip()
    if not start or any(lead.startswith(start[: len(lead)]) for lead in calls.leads):
        return Shown(thought, "")
    return Shown(thought, content[: settled(content, calls.opens)].rstrip())


def settled(text: str, markers: Sequence[str]) -> int:
    """Where the first marker in `text` starts, or what may become one at its end."""
    settled = len(text)
    for marker in markers:
        at = text.find(marker)
        if at < 0:
            lengths = range(min(len(marker) - 1, len(text)), 0, -1)
            at = next((len(text) - size for size in lengths if text.endswith(marker[:size])), len(text))
        settled = min(settled, at)
    return settled


def last_query(messages: Sequence[Message]) -> int:
    """The index of the last user message; -1 without one."""
    return max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)


def reasoning_is_dropped(history: Sequence[Message], new: Sequence[Message]) -> str:
    """The rule that most thinking models' templates have: reasoning before the last user message goes."""
    asked = any(message.role == "user" for message in new)
    if asked and any(message.reasoning for message in history[last_query(history) + 1 :]):
        return "the template drops the reasoning of turns before the last user message"
    return ""


def described(tool: ToolDescription) -> dict[str, Any]:
    """A tool as the templates list it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
