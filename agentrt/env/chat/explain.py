"""`explain`: what a renderer does with a conversation, in words and with a small worked example."""

from collections.abc import Sequence

from agentrt.core.errors import UsageError
from agentrt.env.chat import proof
from agentrt.env.chat.derived import Derived
from agentrt.env.chat.message import Message, ToolCall
from agentrt.env.chat.renderer import Family
from agentrt.env.chat.template import Template

GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"

_QUESTION, _MORE = Message("user", "2+3?"), Message("user", "And 4+4?")
_CALL = Message("assistant", "", calls=(ToolCall("add", {"a": 2, "b": 3}, id="callidone"),))
_RESULT, _ANSWER = Message("tool", "5", name="add", call_id="callidone"), Message("assistant", "It is 5.")


def explain(renderer: Family, template: Template | None = None, *, colour: bool = False) -> str:
    """The text that `agentrt doctor --template` prints.

    It says which renderer is used, what ends a turn, what joins turns, and (given the model's own `template`) where the
    template rewrites history; then a conversation in which the policy's ids are green or, without colour, in «».
    """
    lines = [f"renderer   {_name(renderer)}", f"calls      {renderer.calls.name}"]
    lines.append(f"reasoning  {'…'.join(renderer.thinking) if renderer.thinking else 'none'}")
    ends = ", ".join(f"{renderer.tokenizer.decode([end])!r} ({end})" for end in renderer.stop_token_ids)
    lines += [f"turn ends  {ends}", "", "joining ids"]
    for what, messages in (("a question", [_MORE]), ("a tool result", [_RESULT])):
        lines.append(f"  {what:<14} {_ids(renderer, messages)}")
    if template is not None:
        lines += ["", "appending is the same as rendering the whole"]
        lines += [_row(finding) for finding in proof.prove(renderer, template)]
        if not proof.lists_tools(template):
            lines.append("  the template lists no tools")
    return "\n".join([*lines, "", *_example(renderer, colour)]) + "\n"


def _name(renderer: Family) -> str:
    return "derived from the template" if isinstance(renderer, Derived) else type(renderer).__name__


def _row(finding: proof.Finding) -> str:
    outcome = {
        "same": "yes",
        "rewritten": f"no: the template {finding.kind.words}; a run appends, or opens a new branch",
        "refused": f"not rendered: {finding.reason}",
    }[finding.verdict]
    return f"  {finding.kind.name:<44} {outcome}"


def _ids(renderer: Family, messages: Sequence[Message]) -> str:
    try:
        ids = renderer.join(messages, ended=True)
    except UsageError as error:
        return f"none: {error}"
    return f"{ids}  {renderer.tokenizer.decode(ids)!r}"


def _example(renderer: Family, colour: bool) -> list[str]:
    """A conversation as text, what the policy samples set apart."""
    opened, closed = (GREEN, RESET) if colour else ("«", "»")
    dimmed, plain = (DIM, RESET) if colour else ("", "")
    head = f"example ({opened}mask 1, sampled{closed}; the rest is mask 0)"
    try:
        parts = [renderer.prompt([_QUESTION]), renderer.turn(_CALL), renderer.join([_RESULT], ended=True)]
        parts += [renderer.turn(_ANSWER), renderer.join([_MORE], ended=True)]
    except UsageError:
        parts = [renderer.prompt([_QUESTION]), renderer.turn(_ANSWER), renderer.join([_MORE], ended=True)]
    texts = [renderer.tokenizer.decode(part) for part in parts]
    shown = (
        f"{opened}{text}{closed}" if index % 2 else f"{dimmed}{text}{plain}" for index, text in enumerate(texts)
    )  # fmt: skip
    return [head, "".join(shown)]
