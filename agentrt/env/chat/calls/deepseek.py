"""Tool calls of DeepSeek-V3: JSON between the family's own markers.

V3 writes `function`, the separator, the name and a fenced JSON block; V3.1 the name, the separator and bare JSON. Both
are read.
"""

from agentrt.env.chat.calls.blocks import Cursor, parse_blocks
from agentrt.env.chat.calls.exact import read_arguments
from agentrt.env.chat.calls.format import CallFormat, Parsed, Schemas
from agentrt.env.chat.message import ToolCall

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE, END_FENCE = "```json", "```"


def parse_calls(text: str, schemas: Schemas | None = None) -> Parsed:
    """See `CallFormat.parse`."""
    return parse_blocks(text, OPEN, lambda text, start: _block(Cursor(text, start)))


def _block(at: Cursor) -> tuple[list[ToolCall], int]:
    calls = list[ToolCall]()
    at.skip_space()
    while at.take(CALL):
        call = _call(at)
        calls.append(call)
        if call.error:
            at.jump(END_CALL)
        at.skip_space()
    if not at.take(CLOSE) and not at.is_at_end:
        calls.append(ToolCall("", error=f"expected {CALL} or {CLOSE} after the calls"))
        at.jump(CLOSE)
    return calls or [ToolCall("", error=f"there is no call between {OPEN} and {CLOSE}")], at.at


def _call(at: Cursor) -> ToolCall:
    name = at.until(SEPARATOR)
    if name is None or CALL in name or END_CALL in name:
        return ToolCall("", error=f"there is no {SEPARATOR} after {CALL}")
    at.skip_space()
    is_fenced = not at.text.startswith("{", at.at)
    if is_fenced:
        name = at.until("\n") or ""
        at.skip_space()
        if not at.take(FENCE):
            return ToolCall(name.strip(), error=f"the arguments are not in a {FENCE} block")
        at.skip_space()
    if not (name := name.strip()):
        return ToolCall("", error="the call names no tool")
    call, at.at = read_arguments(at.text, at.at, END_CALL, name)
    at.skip_space()
    closed = not is_fenced or at.take(END_FENCE)
    at.skip_space()
    if call.error or (closed and (at.take(END_CALL) or at.is_at_end)):
        return call
    return ToolCall(name, error=f"the arguments are not followed by {END_CALL}")


DEEPSEEK = CallFormat("deepseek", parse_calls, opens=(OPEN,), closes=END_CALL)
