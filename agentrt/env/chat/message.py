"""What is said in a conversation: messages, tool calls, and the parsed turn of a model."""

from typing import Any, Literal, get_args

import msgspec

from agentrt.core.protocol import FinishReason
from agentrt.core.records import StopReason

Role = Literal["system", "user", "assistant", "tool"]
ROLES = get_args(Role)


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model wrote. One that cannot be dispatched says why in `error`, in words for the model."""

    name: str
    arguments: dict[str, Any] = {}
    error: str = ""
    id: str = ""
    """The model's own mark of the call, in formats that have one; its result is answered with the same mark."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message. Tool messages have `name` and `call_id`, assistant messages `calls` and `reasoning`."""

    role: Role
    content: str
    name: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    call_id: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"Message.role must be one of {', '.join(ROLES)}, not {self.role!r}")
        if not isinstance(self.content, str):
            raise TypeError(f"Message.content must be a string, not {type(self.content).__name__}")


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A model turn, parsed. `calls` is empty for a turn that was cut: half a call is no call."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason
    start: int = 0
    """The turn is the ids `[start, end)` of its branch."""
    end: int = 0
    tool_call_in_reasoning: int = 0
    """1 if the reasoning never closed and holds a call, which is not run; counted in the episode's metrics."""
    cut_by: StopReason | None = None
    """The limit that cut it."""

    @property
    def is_cut(self) -> bool:
        """True if the turn did not end by itself."""
        return self.finish_reason != "stop"

    @property
    def message(self) -> Message:
        """The turn as an assistant message."""
        return Message("assistant", self.content, calls=self.calls, reasoning=self.reasoning)
