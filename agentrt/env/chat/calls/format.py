"""`CallFormat`: how a model family writes tool calls in the text of a turn, as far as reading goes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agentrt.env.chat.message import ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments, by tool."""

Parsed = tuple[str, tuple[ToolCall, ...]]
"""The text outside the calls, and the calls in order."""


class CallFormat(NamedTuple):
    """A format. `opens` and `leads` say how early text can be shown while a turn is still sampled."""

    name: str
    parse: Callable[[str, Schemas], Parsed]
    """Reads the whole text after the reasoning. Raises nothing: what cannot be read is a call with an `error`."""
    opens: tuple[str, ...] = ()
    """Markers that begin calls anywhere; the text before the first one is content whatever follows."""
    closes: str = ""
    """The marker that ends a call, if one does."""
    leads: tuple[str, ...] = ()
    """What a turn starts with if it may be a call as a whole."""


def no_calls(text: str, schemas: Schemas) -> Parsed:
    """The format of a model without tools: all text is content."""
    return text, ()


NONE = CallFormat("none", no_calls)
