"""Tool calls in Hermes style: JSON objects between `<tool_call>` and `</tool_call>`.

A block may hold several objects and a turn several blocks. Strings are read by the JSON scanner, so braces and markers
inside them are data. A call that cannot be read is still a call: its `error` tells the model what is wrong and where,
the calls around it are kept, and nothing is guessed.
"""

from agentrt.env.chat.calls.blocks import parse_blocks
from agentrt.env.chat.calls.exact import read_call, skip_space
from agentrt.env.chat.calls.format import CallFormat, Parsed, Schemas
from agentrt.env.chat.message import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse_calls(text: str, schemas: Schemas | None = None) -> Parsed:
    """See `CallFormat.parse`; the types are in the JSON, so the schemas are not needed."""
    return parse_blocks(text, OPEN, _block)


def _block(text: str, start: int) -> tuple[list[ToolCall], int]:
    """A last block without the closing marker ends with the text: the model ended its turn there itself."""
    calls, at = list[ToolCall](), skip_space(text, start)
    while at < len(text) and not text.startswith(CLOSE, at):
        call, end = read_call(text, at, CLOSE)
        calls.append(call)
        at = skip_space(text, end)
    if not calls:
        calls.append(ToolCall("", error=f"there is no JSON object between {OPEN} and {CLOSE}"))
    return calls, min(at + len(CLOSE), len(text))


HERMES = CallFormat("hermes", parse_calls, opens=(OPEN,), closes=CLOSE)
