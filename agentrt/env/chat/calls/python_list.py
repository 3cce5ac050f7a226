"""Calls written as a Python list, `[search(q="x", n=2), now()]`, as Llama 3.2 and Gemma 3 write them.

Read by Python's own parser; only literals are values. A list is meant as calls if it starts with `[name(`; the list may
be in a fence of three backticks.
"""

import ast
import re
import warnings
from collections.abc import Sequence
from typing import Any

from agentrt.env.chat.calls.exact import checked
from agentrt.env.chat.calls.format import CallFormat, Parsed, Schemas
from agentrt.env.chat.message import ToolCall

_START = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_FENCE = re.compile(r"```(?:tool_code|python)?\n(.*?)\n?```\s*", re.DOTALL)


def parse_calls(text: str, schemas: Schemas | None = None) -> Parsed:
    """See `CallFormat.parse`."""
    source = text.strip()
    if fenced := _FENCE.fullmatch(source):
        source = fenced[1].strip()
    return ("", tuple(_calls(source))) if _START.match(source) else (text, ())


def written(calls: Sequence[ToolCall]) -> str:
    """The calls as a policy that follows the format writes them."""
    texts = (f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})" for call in calls)
    return f"[{', '.join(texts)}]"


def _calls(source: str) -> list[ToolCall]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unknown escape in a string is the model's own text
            tree = ast.parse(source, mode="eval")
    except SyntaxError as error:
        reason = f"{error.msg} at character {_offset(source, error)}"
        return [ToolCall("", error=f"the calls are not a Python list: {reason}")]
    except (ValueError, RecursionError, MemoryError) as error:
        return [ToolCall("", error=f"the calls are not a Python list: {error or 'nested too deeply'}")]
    items = tree.body.elts if isinstance(tree.body, ast.List) else ()
    return [_call(item) for item in items] or [ToolCall("", error="the calls are not a Python list")]


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not (name := _name(node.func)):
        return ToolCall("", error=f"item at character {node.col_offset} is not a call, name(argument=value)")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            return ToolCall(name, error="arguments are written name=value, not **")
        if keyword.arg in arguments or _repeats_a_key(keyword.value):
            return ToolCall(name, error=f"{keyword.arg!r} is there twice, or a key in it is")
        try:
            arguments[keyword.arg] = _plain(ast.literal_eval(keyword.value))
        except (ValueError, TypeError, RecursionError, MemoryError):
            return ToolCall(name, error=f"the value of {keyword.arg!r} is not a literal that JSON has")
    if node.args:
        return ToolCall(name, error="arguments are written name=value, not by position")
    return checked(name, arguments)


def _repeats_a_key(node: ast.expr) -> bool:
    """Whether an object in a value has a key twice, of which Python would keep the last."""
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            keys = [key.value for key in part.keys if isinstance(key, ast.Constant)]
            if len(set(keys)) < len(keys):
                return True
    return False


def _plain(value: Any) -> Any:
    """A value of JSON's types; raises TypeError for others. A tuple is an array."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("keys of an object are strings")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{type(value).__name__} is not in JSON")


def _name(node: ast.expr) -> str:
    """`name` or `module.name`; empty for anything else."""
    parts = list[str]()
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join((node.id, *reversed(parts))) if isinstance(node, ast.Name) else ""


def _offset(source: str, error: SyntaxError) -> int:
    lines = source.splitlines(keepends=True)[: max(0, (error.lineno or 1) - 1)]
    return sum(map(len, lines)) + max(0, (error.offset or 1) - 1)


PYTHON = CallFormat("python", parse_calls, leads=("[", "```"))
