"""Tool calls of Mistral: after `[TOOL_CALLS]` a JSON array of calls, or (from tokenizer v11 on) `NAME[ARGS]{...}`.

The second form repeats `[TOOL_CALLS]` for each call and may have `[CALL_ID]ID` before `[ARGS]`.
"""

from agentrt.env.chat.calls.blocks import parse_blocks
from agentrt.env.chat.calls.exact import read_arguments, read_call, skip_space
from agentrt.env.chat.calls.format import CallFormat, Parsed, Schemas
from agentrt.env.chat.message import ToolCall

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def parse_calls(text: str, schemas: Schemas | None = None) -> Parsed:
    """See `CallFormat.parse`."""
    return parse_blocks(text, OPEN, _block)


def _block(text: str, start: int) -> tuple[list[ToolCall], int]:
    at = skip_space(text, start)
    return _array(text, at) if text.startswith("[", at) and not text.startswith(ARGS, at) else _named(text, at)


def _array(text: str, start: int) -> tuple[list[ToolCall], int]:
    calls, at = list[ToolCall](), skip_space(text, start + 1)
    while not text.startswith("]", at):
        call, at = read_call(text, at, OPEN)
        calls.append(call)
        at = skip_space(text, at)
        if text.startswith(",", at):
            at = skip_space(text, at + 1)
        elif not text.startswith("]", at):
            # The list is broken here; what was read before is whole, and what follows cannot be told apart.
            end = text.find(OPEN, at)
            reason = f"the list of calls is not valid JSON: expected , or ] at character {at - start}"
            broken = [] if calls[-1].error else [ToolCall("", error=reason)]
            return calls + broken, len(text) if end < 0 else end
    return calls or [ToolCall("", error=f"the list after {OPEN} is empty")], at + 1


def _named(text: str, start: int) -> tuple[list[ToolCall], int]:
    end = text.find(OPEN, start)
    end = len(text) if end < 0 else end
    args = text.find(ARGS, start, end)
    if args < 0:
        return [ToolCall("", error=f"{OPEN} is followed by neither a list nor NAME{ARGS}")], end
    name, _, call_id = text[start:args].partition(CALL_ID)
    if not (name := name.strip()):
        return [ToolCall("", error=f"there is no name of a tool before {ARGS}")], end
    call, at = read_arguments(text, skip_space(text, args + len(ARGS)), OPEN, name)
    return [ToolCall(name, call.arguments, call.error, call_id.strip())], at


MISTRAL = CallFormat("mistral", parse_calls, opens=(OPEN,))
