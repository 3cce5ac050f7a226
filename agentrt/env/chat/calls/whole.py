"""A turn that is a call as a whole: JSON objects with name and parameters (or arguments), as Llama 3.1 writes them.

Several stand one after the other, also with `;` between, or in one array; `<|python_tag|>` may come first. Any other
text, JSON too, is content: without a marker only the shape says that a call is meant.
"""

import json
import re
from typing import Any

from agentrt.env.chat.calls.exact import call_of, read_call, skip_space, value_of
from agentrt.env.chat.calls.format import CallFormat, Parsed, Schemas
from agentrt.env.chat.message import ToolCall

PYTHON_TAG = "<|python_tag|>"

_CALL = re.compile(r'\{\s*"(?:name|type)"\s*:\s*"')
_HAS_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')


def parse_calls(text: str, schemas: Schemas | None = None) -> Parsed:
    """See `CallFormat.parse`."""
    tagged = text.strip().startswith(PYTHON_TAG)
    source = text.strip().removeprefix(PYTHON_TAG).strip()
    if source.startswith("["):
        return ("", calls) if (calls := _array(source)) else (text, ())
    if tagged or (_CALL.match(source) and _HAS_ARGUMENTS.search(source)):
        return "", tuple(_sequence(source))
    return text, ()


def _sequence(source: str) -> list[ToolCall]:
    calls, at = list[ToolCall](), 0
    while at < len(source) or not calls:
        call, at = read_call(source, at, None)
        calls.append(call)
        at = skip_space(source, at)
        if source.startswith(";", at):
            at = skip_space(source, at + 1)
    return calls


def _array(source: str) -> tuple[ToolCall, ...]:
    """The calls of an array in which every item has the shape of one; empty otherwise."""
    try:
        items = value_of(source)
    except (json.JSONDecodeError, RecursionError):
        return ()
    except ValueError as error:  # a key that is there twice
        return (ToolCall("", error=str(error)),) if _CALL.match(source, skip_space(source, 1)) else ()
    return tuple(map(call_of, items)) if all(map(_is_shaped, items)) else ()


def _is_shaped(item: Any) -> bool:
    return isinstance(item, dict) and "name" in item and not item.keys().isdisjoint(("parameters", "arguments"))


WHOLE = CallFormat("json", parse_calls, leads=("{", "[", PYTHON_TAG))
