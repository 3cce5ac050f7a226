"""Tool calls of GLM-4.5: `<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>TEXT</arg_value>` for each argument.

Types come from the tool's schema: strings are written bare, everything else as JSON.
"""

from agentrt.env.chat.calls.blocks import Cursor, parse_blocks
from agentrt.env.chat.calls.format import CallFormat, Parsed, Schemas
from agentrt.env.chat.calls.typed import typed_call
from agentrt.env.chat.message import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def parse_calls(text: str, schemas: Schemas) -> Parsed:
    """See `CallFormat.parse`."""
    return parse_blocks(text, OPEN, lambda text, start: _block(Cursor(text, start), schemas))


def _block(at: Cursor, schemas: Schemas) -> tuple[list[ToolCall], int]:
    start = at.at
    ends = [end for marker in (KEY, CLOSE) if (end := at.text.find(marker, start)) >= 0]
    at.at = min(ends, default=len(at.text))
    name = at.text[start : at.at].strip()
    call = _arguments(at, name, schemas) if name and "<" not in name else ToolCall("", error="the call names no tool")
    if call.error:
        at.jump(CLOSE)
    return [call], at.at


def _arguments(at: Cursor, name: str, schemas: Schemas) -> ToolCall:
    start, pairs = at.at, list[tuple[str, str]]()
    while at.take(KEY):
        key = at.until(END_KEY)
        at.skip_space()
        text = at.until(END_VALUE) if at.take(VALUE) else None
        if not key or text is None:
            return ToolCall(name, error=f"an {KEY} without its {VALUE} at character {at.at - start} of the arguments")
        pairs.append((key, text))
        at.skip_space()
    if not at.take(CLOSE) and not at.is_at_end:
        return ToolCall(name, error=f"expected {KEY} or {CLOSE} at character {at.at - start} of the arguments")
    return typed_call(name, pairs, schemas.get(name))


GLM = CallFormat("glm", parse_calls, opens=(OPEN,), closes=CLOSE)
