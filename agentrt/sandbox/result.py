"""`ToolResult`: how one tool call ended and what it gave."""

from typing import Literal

import msgspec

Outcome = Literal["ok", "tool_error", "exit_nonzero", "signal", "timeout", "infra"]


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """One finished call. A cancelled call has no result: the cancellation passes through, after the tear-down."""

    outcome: Outcome
    """tool_error: the tool replied `{"error": ...}`; infra: no process could be started, never the tool's fault."""
    text: str
    """The reply, or standard output without one; the tool's or the system's error for tool_error and infra."""
    stderr: str = ""
    exit_code: int | None = None
    """Negative: the signal that ended it."""
    seconds: float = 0.0
    truncated: bool = False
    """`text` is not all of it; it says in place how much is missing."""
    total_bytes: int = 0
    """What the tool wrote of `text`."""
    decode_errors: int = 0
    """Pieces that were no UTF-8 and became U+FFFD."""
