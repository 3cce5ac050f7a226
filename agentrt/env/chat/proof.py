"""`prove`: where appending to a conversation is the same as rendering it whole with the model's own template.

Probe conversations of each kind that an episode meets are rendered both ways and compared, text and control tokens
(ids would also show how a policy splits the first characters of its turn). Where they differ the template rewrites
history: that kind becomes a rule, and a renderer made of the template names it in `rewrites`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from agentrt.core.errors import UsageError
from agentrt.env.chat.message import Message, ToolCall
from agentrt.env.chat.renderer import Family, ToolDescription, last_query
from agentrt.env.chat.template import Template, plain_message, plain_tools

Verdict = Literal["same", "rewritten", "refused"]


class _Tool(NamedTuple):
    name: str
    description: str
    parameters: dict[str, Any]


class Kind(NamedTuple):
    """A kind of continuation: its name, a probe of it, and how to tell it."""

    name: str
    words: str
    """What the template does if it rewrites here, after "the template"."""
    opening: tuple[Message, ...]
    exchanges: tuple[tuple[Message, tuple[Message, ...]], ...]
    has_tools: bool
    """The probe lists a tool."""
    applies: Callable[[Sequence[Message], Sequence[Message], bool], bool]
    """From the history, the new messages and whether there are tools."""

    @property
    def calls(self) -> bool:
        """The probe has tool calls."""
        return any(turn.calls for turn, _ in self.exchanges)

    @property
    def asks(self) -> bool:
        """The new message is a question."""
        return any(message.role == "user" for message in self.exchanges[-1][1])


class Finding(NamedTuple):
    """What `prove` found for one kind."""

    kind: Kind
    verdict: Verdict
    is_known: bool = False
    """The renderer names a rule here."""
    opens_alike: bool = False
    """The renderer's prompt for the opening is what the template writes."""
    reason: str = ""


def prove(renderer: Family, template: Template) -> tuple[Finding, ...]:
    """Try every kind. Raises nothing: a probe that template or renderer refuse is `refused`, with the reason.

    For a template that lists no tools the probes have none either.
    """
    with_tools = lists_tools(template)
    kinds = [kind._replace(has_tools=kind.has_tools and with_tools) for kind in KINDS]
    findings = [_try(kind, renderer, template) for kind in kinds]
    broken = [finding.kind.words for finding in findings if finding.verdict == "rewritten" and finding.kind.asks]
    if not broken:
        return tuple(findings)
    # A question that changes a plain answer changes every answer: that is the rule, and no other one.
    same_rule = [finding._replace(kind=finding.kind._replace(words=broken[0])) for finding in findings]
    return tuple(new if old.kind.asks else old for old, new in zip(findings, same_rule, strict=True))


def lists_tools(template: Template) -> bool:
    """True if the template tells the model of its tools."""
    try:
        return whole(template, [_QUESTION], [_PROBE]) != whole(template, [_QUESTION])
    except UsageError:
        return False


def rule(findings: Sequence[Finding], history: Sequence[Message], new: Sequence[Message], has_tools: bool) -> str:
    """The first finding by which the template rewrites `history` once `new` follows; empty if none."""
    for finding in findings:
        if finding.verdict == "rewritten" and finding.kind.applies(history, new, has_tools):
            return f"the template {finding.kind.words}"
    return ""


def admits(template: Template, kind: Kind) -> bool:
    """True if the template can render the probe."""
    said = [*kind.opening, *(message for turn, answers in kind.exchanges for message in (turn, *answers))]
    try:
        whole(template, said, (_PROBE,) if kind.has_tools else ())
    except UsageError:
        return False
    return True


def whole(template: Template, messages: Sequence[Message], tools: Sequence[ToolDescription] = ()) -> list[int]:
    """The ids of a whole conversation, contents as text, with the start of the model's turn."""
    for as_text in (False, True):
        plain = [plain_message(message, arguments_as_text=as_text) for message in messages]
        protected = template.protected(plain, plain_tools(tools))
        try:
            return template.encode(template.text(protected.messages, protected.tools), protected)
        except UsageError:
            if as_text:
                raise
    raise AssertionError("unreachable")


def _try(kind: Kind, renderer: Family, template: Template) -> Finding:
    tools = (_PROBE,) if kind.has_tools else ()
    said, is_known, spelt = list(kind.opening), False, renderer.tokenizer.decode
    try:
        ids = renderer.prompt(said, tools)
        opens_alike = spelt(ids) == spelt(whole(template, said, tools))
        for turn, answers in kind.exchanges:
            is_known = bool(renderer.rewrites([*said, turn], answers, tools))
            ids += renderer.turn(turn) + renderer.join(answers, ended=True)
            said += [turn, *answers]
        expected = whole(template, said, tools)
    except UsageError as error:
        return Finding(kind, "refused", reason=str(error))
    return Finding(kind, "same" if spelt(ids) == spelt(expected) else "rewritten", is_known, opens_alike)


_ID, _OTHER_ID = "probeid01", "probeid02"
_PROBE = _Tool("probe", "Probes.", {"type": "object", "properties": {"key": {"type": "string"}}})
_QUESTION, _AGAIN = Message("user", "First question?"), Message("user", "Second question?")
_ANSWER, _THOUGHT = Message("assistant", "An answer."), Message("assistant", "An answer.", reasoning="A thought.")
_CALL = Message("assistant", "", calls=(ToolCall("probe", {"key": "x"}, id=_ID),))
_THOUGHT_CALL = Message("assistant", "", calls=_CALL.calls, reasoning="A thought.")
_CALLS = Message("assistant", "", calls=(*_CALL.calls, ToolCall("probe", {"key": "y"}, id=_OTHER_ID)))
_RESULT = Message("tool", "A result.", name="probe", call_id=_ID)
_RESULTS = (_RESULT, Message("tool", "Another.", name="probe", call_id=_OTHER_ID))


def _asks(new: Sequence[Message]) -> bool:
    return any(message.role == "user" for message in new)


def _since_query(history: Sequence[Message]) -> Sequence[Message]:
    return history[last_query(history) + 1 :]


KINDS: tuple[Kind, ...] = (
    Kind(
        "a question after an answer", "changes an answer once a question follows",
        (_QUESTION,), ((_ANSWER, (_AGAIN,)),), False,
        lambda history, new, has_tools: _asks(new) and not any(m.reasoning for m in _since_query(history)),
    ),
    Kind(
        "a question after an answer with reasoning", "drops the reasoning of turns before the last user message",
        (_QUESTION,), ((_THOUGHT, (_AGAIN,)),), False,
        lambda history, new, has_tools: _asks(new) and any(m.reasoning for m in _since_query(history)),
    ),
    Kind(
        "tool results", "changes a turn with calls once results follow",
        (_QUESTION,), ((_CALL, (_RESULT,)),), True,
        lambda history, new, has_tools: not _asks(new) and not any(m.reasoning for m in _since_query(history)),
    ),
    Kind(
        "results of parallel calls", "changes a turn with several calls once results follow",
        (_QUESTION,), ((_CALLS, _RESULTS),), True,
        lambda history, new, has_tools: bool(history) and len(history[-1].calls) > 1 and not history[-1].reasoning,
    ),
    Kind(
        "tool results after reasoning", "drops the reasoning of turns with calls",
        (_QUESTION,), ((_THOUGHT_CALL, (_RESULT,)),), True,
        lambda history, new, has_tools: not _asks(new) and any(m.reasoning for m in _since_query(history)),
    ),
    Kind(
        "a second round of calls", "writes the second round of calls otherwise than the first",
        (_QUESTION,), ((_CALL, (_RESULT,)), (_CALL, (_RESULT,))), True,
        lambda history, new, has_tools: sum(bool(message.calls) for message in history) > 1,
    ),
    Kind(
        "a question with tools listed", "moves the tool list when a question follows",
        (_QUESTION,), ((_ANSWER, (_AGAIN,)),), True,
        lambda history, new, has_tools: _asks(new) and has_tools,
    ),
    Kind(
        "a question with a system text", "moves the system text when a question follows",
        (Message("system", "Be brief."), _QUESTION), ((_ANSWER, (_AGAIN,)),), False,
        lambda history, new, has_tools: _asks(new) and bool(history) and history[0].role == "system",
    ),
    Kind(
        "a question after tool use", "changes turns with calls once a question follows",
        (_QUESTION,), ((_CALL, (_RESULT,)), (_ANSWER, (_AGAIN,))), True,
        lambda history, new, has_tools: _asks(new) and any(message.calls for message in history),
    ),
)  # fmt: skip
