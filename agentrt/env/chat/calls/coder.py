"""Tool calls of Qwen3-Coder: `<function=NAME>` with `<parameter=KEY>TEXT</parameter>` inside, in `<tool_call>`.

The text of a parameter ends at its closing tag, so the other tags are data inside it; the one newline that the format
writes on either side is taken off. Types come from the tool's schema.
"""

from agentrt.env.chat.calls.blocks import Cursor, parse_blocks
from agentrt.env.chat.calls.format import CallFormat, Parsed, Schemas
from agentrt.env.chat.calls.typed import typed_call
from agentrt.env.chat.message import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"


def parse_calls(text: str, schemas: Schemas) -> Parsed:
    """See `CallFormat.parse`."""
    return parse_blocks(text, OPEN, lambda text, start: _block(Cursor(text, start), schemas))


def _block(at: Cursor, schemas: Schemas) -> tuple[list[ToolCall], int]:
    calls = list[ToolCall]()
    at.skip_space()
    while not at.is_at_end and not at.take(CLOSE):
        call = _call(at, schemas)
        calls.append(call)
        if call.error:
            at.jump(CLOSE)
            break
        at.skip_space()
    return calls or [ToolCall("", error=f"there is no {FUNCTION}NAME> between {OPEN} and {CLOSE}")], at.at


def _call(at: Cursor, schemas: Schemas) -> ToolCall:
    start = at.at
    if not at.take(FUNCTION):
        return ToolCall("", error=f"the call does not start with {FUNCTION}NAME>")
    name = at.until(">")
    if not name or "<" in name or "\n" in name:
        return ToolCall("", error=f"{FUNCTION} is not followed by the name of a tool and >")
    pairs = list[tuple[str, str]]()
    at.skip_space()
    while at.take(PARAMETER):
        key, text = at.until(">"), at.until(END_PARAMETER)
        if not key or text is None or "\n" in key:
            return ToolCall(name, error=f"a parameter is not closed by {END_PARAMETER} at character {at.at - start}")
        pairs.append((key, text.removeprefix("\n").removesuffix("\n")))
        at.skip_space()
    if not at.take(END_FUNCTION):
        return ToolCall(name, error=f"expected {PARAMETER}KEY> or {END_FUNCTION} at character {at.at - start}")
    return typed_call(name, pairs, schemas.get(name))


CODER = CallFormat("coder", parse_calls, opens=(OPEN,), closes=CLOSE)
