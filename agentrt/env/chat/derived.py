"""`Derived`: the renderer of any Jinja chat template, found by probing it.

Marks put into small probe conversations show where a turn ends and what comes after it. The joining text of new
messages is what the template writes after such a marked turn when they follow it: its cost does not depend on the
history, and nothing sampled is rendered. `proof.prove` then says where appending is the same as rendering the
whole.
"""

from collections.abc import Sequence
from typing import Any

from agentrt.core.errors import UsageError
from agentrt.core.protocol import FinishReason
from agentrt.env.chat import harmony, proof, reasoning
from agentrt.env.chat.calls import coder, deepseek, glm, hermes, mistral, python_list, whole
from agentrt.env.chat.calls.format import NONE, CallFormat, Schemas
from agentrt.env.chat.message import Message, ToolCall, Turn
from agentrt.env.chat.renderer import Family, Shown, ToolDescription
from agentrt.env.chat.template import Protected, Template, plain_message, plain_tools

QUESTION, ANSWER, VALUE = "QUESTIONMARK", "ANSWERMARK", "VALUEMARK"
"""Words of the probes that no template has."""

CALL_ID = "callidone"
"""Nine letters and digits, as Mistral's templates demand."""

UNKNOWN = NONE._replace(name="unknown")
"""The template writes calls in a way that no parser reads."""

_FORMATS = (
    deepseek.DEEPSEEK, mistral.MISTRAL, coder.CODER, hermes.HERMES, glm.GLM, python_list.PYTHON, whole.WHOLE,
)  # fmt: skip


class Derived(Family):
    """A renderer made of a template; `UsageError` if the template cannot end a turn that a vocabulary can say."""

    def __init__(self, template: Template) -> None:
        self.template, self.tokenizer = template, template.tokenizer
        self._calls_as_text = self._wants_text_arguments()
        self._opening = self._render([Message("user", QUESTION)])
        self._stops, self._ends, self._next_speaker_ends = self._find_ends()
        self.stop_token_ids = tuple(self.tokenizer.special[end] for end in self._stops)
        self._is_harmony = harmony.CHANNEL in template.source
        self.thinking = self._find_thinking()
        opened = self._opening[self._opening.index(QUESTION) :]
        self.thinks_at_once = self.thinking is not None and opened.rstrip().endswith(self.thinking.open)
        self._call_text = self._find_call_text()
        self.calls = harmony.HARMONY if self._is_harmony else self._find_calls()
        self.lists_tools = proof.lists_tools(template)
        self.findings: tuple[proof.Finding, ...] = ()
        self.findings = proof.prove(self, template)
        """Where appending is the same as rendering the whole, and where it is not."""

    def rewrites(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolDescription] = ()
    ) -> str:
        """See `Renderer.rewrites`; by kind of continuation, as the probes found it."""
        return proof.rule(self.findings, history, new, bool(tools))

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolDescription] = ()) -> list[int]:
        """See `Renderer.prompt`. `UsageError` for tools that the model would not hear of or whose calls nobody could read."""
        if tools and not self.lists_tools:
            raise UsageError("the model's chat template lists no tools; use a model whose template does")
        if tools and self.calls is UNKNOWN:
            raise UsageError(
                f"no parser reads the calls of the model's chat template, {self._call_text!r}; use another model"
            )
        protected = self.template.protected(self._plain(messages), plain_tools(tools))
        return self.template.encode(self.template.text(protected.messages, protected.tools), protected)

    def join(self, messages: Sequence[Message], *, ended: bool, end_id: int | None = None) -> list[int]:
        """See `Renderer.join`."""
        marked = _marked(messages) if self._call_text else Message("assistant", ANSWER)
        protected = self.template.protected(self._plain([Message("user", QUESTION), marked, *messages]))
        text = self.template.text(protected.messages)
        start, after = self._end_of_marked(text)
        if ended and not (self._next_speaker_ends and end_id not in (None, self.tokenizer.special[text[start:after]])):
            start = after
        return self.template.encode(text[start:], protected)

    def turn(self, message: Message) -> list[int]:
        """See `Renderer.turn`. `UsageError` if the template writes a last turn otherwise than the prompt starts it."""
        protected, text = self.turn_text(message)
        return self.template.encode(text, protected)

    def read(self, text: str, finish_reason: FinishReason, schemas: Schemas) -> Turn:
        """See `Family.read`."""
        return harmony.read(text, finish_reason) if self._is_harmony else super().read(text, finish_reason, schemas)

    def visible(self, text: str) -> Shown:
        """See `Renderer.visible`."""
        return harmony.visible(text) if self._is_harmony else super().visible(text)

    def turn_text(self, message: Message) -> tuple[Protected, str]:
        """The text that the policy adds to the opening of a turn, with the end token."""
        following: list[Message] = []
        if not message.reasoning and not self.thinks_at_once:  # some add an empty reasoning block to a last message
            following = [Message("tool", VALUE, name=call.name, call_id=call.id) for call in message.calls]
            following = following or [Message("user", VALUE)]
        protected = self.template.protected(self._plain([Message("user", QUESTION), message, *following]))
        text = self.template.text(protected.messages, generate=False)
        body = self._after_opening(text, message)
        until = body.find(VALUE) if following else len(body)
        at = self._find_end(body, until, last=not following or bool(message.calls))
        if at is None:
            return protected, body.rstrip() + self._stops[1 if message.calls and len(self._stops) > 1 else 0]
        end = body[at[0] : at[1]]
        return protected, body[: at[0]] + (end if end in self._stops else self._stops[0])

    def _after_opening(self, text: str, message: Message) -> str:
        """What follows the generation prompt in a text that starts as it does, but for the reasoning block that it opens
        (or writes empty) and history has not."""
        if text.startswith(self._opening):
            return text[len(self._opening) :]
        bare = self._opening.rpartition(self.thinking.open)[0] if self.thinking else ""
        if self.thinking and bare and text.startswith(bare):
            thought = f"{message.reasoning}\n{self.thinking.close}\n\n" if self.thinks_at_once else ""
            return thought + text[len(bare) :]
        raise UsageError("the template writes a turn of the model otherwise than its generation prompt starts it")

    def _find_end(self, text: str, until: int, *, last: bool) -> tuple[int, int] | None:
        """The first (or last) end token before `until`."""
        found = [marker.span() for marker in self.template.markers.finditer(text, 0, until) if marker[0] in self._ends]
        return found[-1 if last else 0] if found else None

    def _end_of_marked(self, text: str) -> tuple[int, int]:
        """Where the end token of the marked turn starts and ends."""
        # Contents that happen to hold a mark come later.
        found = [at for mark in (ANSWER, VALUE) if (at := text.find(mark)) >= 0]
        if not found:
            raise UsageError("the template does not write all calls of a turn, so their results have no place")
        for marker in self.template.markers.finditer(text, min(found)):
            if marker[0] in self._ends:
                return marker.span()
        raise UsageError("the template writes no end of a turn before the next message")

    def _find_ends(self) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
        """The tokens that end a turn when it is sampled; those and the ones that end it when it is history; and whether
        they are the marks of who speaks next."""
        question, answer = Message("user", QUESTION), Message("assistant", ANSWER)
        alone = self._after_answer([question, answer], generate=False)
        between = self._after_answer([question, answer, Message("user", VALUE)])
        call, result = _call_message(), Message("tool", VALUE, name="probe", call_id=CALL_ID)
        called = self._after_answer([question, call], mark=VALUE, generate=False)
        if alone:
            stops = [alone[0], *called[-1:]]
        else:
            answered = self._after_answer([question, call, result], mark=VALUE)
            stops = between[:1] + answered[len(called) : len(called) + 1]
        if not stops:
            raise UsageError("the template ends the model's turn with no control token, so nothing would stop it")
        return tuple(dict.fromkeys(stops)), tuple(dict.fromkeys([*stops, *between[:1]])), not alone

    def _after_answer(self, messages: Sequence[Message], *, mark: str = ANSWER, generate: bool = True) -> list[str]:
        """The control tokens after the first `mark`; none if the template refuses the messages."""
        try:
            text = self._render(messages, generate=generate)
        except UsageError:
            return []
        _, found, rest = text.partition(mark)
        return [marker[0] for marker in self.template.markers.finditer(rest)] if found else []

    def _find_call_text(self) -> str:
        """A turn with one call as the template writes it; empty if it writes none."""
        try:
            text = self._render([Message("user", QUESTION), _call_message()], generate=False)
        except UsageError:
            return ""
        try:
            written = self._after_opening(text, Message("assistant", ""))
        except UsageError:
            written = text.partition(QUESTION)[2]
        if VALUE not in written:
            return ""
        ends = [written.find(end, written.index(VALUE)) for end in self._ends]
        return written[: min((at for at in ends if at >= 0), default=len(written))]

    def _find_calls(self) -> CallFormat:
        """The format that reads the template's own call back."""
        if not self._call_text:
            return NONE
        schemas = {"probe": {"type": "object", "properties": {"key": {"type": "string"}}}}
        for call_format in _FORMATS:
            _, calls = call_format.parse(self._call_text, schemas)
            if [(call.name, call.arguments) for call in calls] == [("probe", {"key": VALUE})]:
                return call_format
        return UNKNOWN

    def _find_thinking(self) -> reasoning.Markers | None:
        known = (reasoning.THINK, reasoning.Markers("[THINK]", "[/THINK]"))
        return next((markers for markers in known if markers.close in self.template.source), None)

    def _wants_text_arguments(self) -> bool:
        """Some templates join arguments as a string and refuse an object."""
        self._calls_as_text = False
        probe = [Message("user", QUESTION), _call_message()]
        try:
            self._render(probe, generate=False)
        except UsageError:
            self._calls_as_text = True
            try:
                self._render(probe, generate=False)
            except UsageError:
                return False  # it knows no calls at all
            return True
        return False

    def _plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [plain_message(message, arguments_as_text=self._calls_as_text) for message in messages]

    def _render(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        return self.template.text(self._plain(messages), generate=generate)


def _call_message() -> Message:
    return Message("assistant", "", calls=(ToolCall("probe", {"key": VALUE}, id=CALL_ID),))


def _marked(messages: Sequence[Message]) -> Message:
    """A turn with a mark near its end: one that made the calls which `messages` answer, or else an answer."""
    results = [message for message in messages if message.role == "tool"]
    if not results:
        return Message("assistant", ANSWER)
    values = [*[""] * (len(results) - 1), VALUE]
    calls = (
        ToolCall(result.name or "probe", {"key": value}, id=result.call_id or CALL_ID)
        for result, value in zip(results, values, strict=True)
    )
    return Message("assistant", "", calls=tuple(calls))
