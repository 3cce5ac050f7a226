"""JSON that a model wrote, read exactly or refused with the reason and the place; nothing is repaired.

Integers keep all their digits, objects the order of their keys, strings every character. Refused: numbers that Python
cannot pass on (NaN, infinities, `1e400`, integers beyond Python's conversion limit), half a surrogate pair, a key that
is there twice, and what is nested so deeply that somebody on its way to the tool and the record could not follow.
"""

import json
import re
import sys
from typing import Any

from agentrt.env.chat.message import ToolCall

DEEPEST = 100
"""Objects and arrays in one another, at most."""

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')


def skip_space(text: str, at: int) -> int:
    """The first position from `at` on that is no whitespace."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def read_call(text: str, start: int, close: str | None) -> tuple[ToolCall, int]:
    """The call object that starts at `start` and where it ends.

    One that is no JSON takes all up to the next `close`, or (without one) to the end: strings in it cannot be told
    apart. `text` does not start with `close` there.
    """
    try:
        value, end = _decoded(text, start)
    except json.JSONDecodeError as error:
        end = _find(text, close, max(start, error.pos))
        return _malformed(text[start:end], error.msg, error.pos - start), end
    except _RepeatedKeyError as error:
        return ToolCall(_name_in(text[start : error.end]), error=str(error)), error.end
    except RecursionError:
        return ToolCall("", error="the call is nested too deeply"), _find(text, close, start)
    return call_of(value), end


def read_arguments(text: str, start: int, close: str | None, name: str) -> tuple[ToolCall, int]:
    """A call of `name` with the arguments object that starts at `start`, and where it ends; see `read_call`."""
    try:
        value, end = _decoded(text, start)
    except json.JSONDecodeError as error:
        return ToolCall(name, error=_not_json(error.msg, error.pos - start)), _find(text, close, max(start, error.pos))
    except _RepeatedKeyError as error:
        return ToolCall(name, error=str(error)), error.end
    except RecursionError:
        return ToolCall(name, error="the arguments are nested too deeply"), _find(text, close, start)
    return checked(name, value), end


def call_of(value: Any) -> ToolCall:
    """The call that a JSON value says, or what is wrong with it."""
    if not isinstance(value, dict):
        return ToolCall("", error=f"a call is a JSON object with name and arguments, not {_kind(value)}")
    name, call_id = value.get("name"), value.get("id", "")
    if not isinstance(name, str) or not name or refusal(name):
        return ToolCall("", error='the call has no "name" of a tool')
    arguments = value.get("arguments", value.get("parameters", {}))
    call_id = call_id if isinstance(call_id, str) and not refusal(call_id) else ""
    if not isinstance(arguments, str):
        return checked(name, arguments, call_id)
    call, end = read_arguments(arguments, skip_space(arguments, 0), None, name)
    rest = skip_space(arguments, end)
    if not call.error and rest < len(arguments):
        return ToolCall(name, error=_not_json("Extra data", rest), id=call_id)
    return ToolCall(name, call.arguments, call.error, call_id)


def checked(name: str, arguments: Any, call_id: str = "") -> ToolCall:
    """The call of `name` with `arguments`, or what is wrong with them."""
    if not isinstance(arguments, dict):
        return ToolCall(name, error=f"the arguments are a JSON object, not {_kind(arguments)}", id=call_id)
    reason = refusal(arguments)
    return ToolCall(name, error=reason, id=call_id) if reason else ToolCall(name, arguments, id=call_id)


def refusal(value: Any) -> str:
    """Why a parsed value cannot be passed on; empty if it can. Walks without recursion: depth is the model's choice."""
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, (dict, list)):
            if depth == DEEPEST:
                return "the arguments are nested too deeply"
            inside = [*item.keys(), *item.values()] if isinstance(item, dict) else item
            pending += [(one, depth + 1) for one in inside]
        elif isinstance(item, int) and _has_too_many_digits(item):
            return "the arguments hold a number of too many digits"
        elif isinstance(item, float) and not abs(item) <= sys.float_info.max:
            return "the arguments hold a number that is not finite or too large"
        elif isinstance(item, str) and _SURROGATE.search(item):
            return "the arguments hold half of a surrogate pair, which is no character"
    return ""


def value_of(text: str) -> Any:
    """The JSON value that is all of `text`; raises ValueError or RecursionError if it is none."""
    return _STRICT.decode(text)


class _RepeatedKeyError(ValueError):
    """A key is in an object twice, in a value that goes on to `end`."""

    end = 0


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that starts at `start` and where it ends. What is no JSON says so, whatever key was twice before."""
    try:
        return _STRICT.raw_decode(text, start)
    except _RepeatedKeyError as error:
        _, error.end = _LENIENT.raw_decode(text, start)
        raise


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise _RepeatedKeyError(f"the key {json.dumps(twice)} is there twice")
    return made


def _malformed(source: str, message: str, position: int) -> ToolCall:
    """A call whose JSON is broken; the position counts from the arguments if that is where it broke."""
    arguments = _ARGUMENTS.search(source)
    if arguments is None or position < arguments.end():
        return ToolCall(_name_in(source), error=f"the call is not valid JSON: {message} at character {position}")
    return ToolCall(_name_in(source), error=_not_json(message, position - arguments.end()))


def _name_in(source: str) -> str:
    name = _NAME.search(source)
    return name[1] if name else ""


def _not_json(message: str, position: int) -> str:
    return f"the arguments are not valid JSON: {message} at character {position}"


def _find(text: str, marker: str | None, start: int) -> int:
    at = -1 if marker is None else text.find(marker, start)
    return len(text) if at < 0 else at


def _integer(digits: str) -> int | float:
    """Exact, or infinity (refused later, as `1e400` is) for more digits than Python converts."""
    limit = sys.get_int_max_str_digits()
    return float("inf") if limit and len(digits) > limit else int(digits)


def _has_too_many_digits(number: int) -> bool:
    """Python reads them as hexadecimal digits, in formats that are its own, and cannot write them as JSON."""
    try:
        str(number)
    except ValueError:
        return True
    return False


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


_SURROGATE = re.compile("[\ud800-\udfff]")
_STRICT = json.JSONDecoder(parse_int=_integer, object_pairs_hook=_object)
_LENIENT = json.JSONDecoder(parse_int=_integer)
"""For the end of an object that `_STRICT` refuses."""
