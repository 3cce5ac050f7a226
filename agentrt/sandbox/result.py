"""`ToolResult`: how one tool call ended and what it gave."""

from typing import Literal

import msgspec

Outcome = Literal[
    "ok", "tool_error", "exit_nonzero", "signal", "timeout", "cpu", "memory", "disk", "output", "infra"
]  # fmt: skip


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """One finished call. A cancelled call has no result: the cancellation passes through, after the tear-down."""

    outcome: Outcome
    """tool_error: the tool replied `{"error": ...}`; cpu, memory, disk: it passed that limit and was ended; output: its
    reply is too long (what it only writes is cut); infra: the sandbox failed or could not start it, never the tool's
    fault."""
    text: str
    """The reply, or standard output without one; the tool's or the system's error for tool_error and infra."""
    stderr: str = ""
    exit_code: int | None = None
    """Negative: the signal that ended it."""
    seconds: float = 0.0
    """From its start to its end; waiting for a place and starting the process are not in it."""
    queue_seconds: float = 0.0
    """For a place among the calls that run."""
    cpu_seconds: float = 0.0
    """Of all its processes, one-shot calls only."""
    truncated: bool = False
    """`text` is not all of it; it says in place how much is missing."""
    total_bytes: int = 0
    """What the tool wrote of `text`."""
    decode_errors: int = 0
    """Pieces that were no UTF-8 and became U+FFFD."""
    isolation: str = ""
    """The level that was in force: `L3:mem=poll`."""
