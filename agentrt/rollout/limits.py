"""`Budget`: every limit of one episode, counted and decided in this one place. Pure: no clock, no engine.

Before a turn the limits are looked at in this order, and the first one that is reached ends the episode: turns, turns
without progress, tokens of the episode, context. What is left of the last two and `max_turn_tokens` gives the turn's
`max_tokens`, which is never below 1. Before calls run, their number is held against `max_tool_calls`: a turn whose
calls would pass it runs none of them. The two limits that need a clock (`wall_seconds`, `tool_seconds`) are cancel
scopes, of the episode and of the call.
"""

from agentrt.core.records import StopReason
from agentrt.core.spec import Limits


class Budget:
    """What an episode has used, over all its branches, and what it may still do."""

    __slots__ = ("calls", "context_length", "has_called", "idle_turns", "limits", "reserved", "sampled", "turns")

    def __init__(self, limits: Limits, context_length: int) -> None:
        self.limits, self.context_length = limits, context_length
        self.turns = self.sampled = self.calls = self.idle_turns = 0
        self.reserved = 0
        """Tokens granted to turns that are being sampled: branches of one episode run side by side."""
        self.has_called = True

    def grant(self, context_tokens: int) -> int | StopReason:
        """`max_tokens` of a turn after `context_tokens` ids, or the limit that leaves no room for one.

        A granted turn counts at once; `settle` says what became of it.
        """
        limits = self.limits
        if not self.has_called:
            self.idle_turns = 0  # a turn without calls cannot repeat one
        if limits.max_turns is not None and self.turns >= limits.max_turns:
            return StopReason.MAX_TURNS
        if limits.max_idle_turns is not None and self.idle_turns >= limits.max_idle_turns:
            return StopReason.NO_PROGRESS
        room = min(limits.max_turn_tokens, self._episode_room())
        if room < 1:
            return StopReason.EPISODE_TOKENS
        room = min(room, self.context_length - context_tokens)
        if room < 1:
            return StopReason.CONTEXT_LENGTH
        self.turns += 1
        self.reserved += room
        self.has_called = False
        return room

    def settle(self, granted: int, sampled: int) -> None:
        """A turn that was granted `granted` tokens took `sampled`."""
        self.reserved -= granted
        self.sampled += sampled

    def cut_by(self, granted: int) -> StopReason:
        """Which limit cut a turn that used all of `granted`."""
        if granted == self.limits.max_turn_tokens:
            return StopReason.TURN_LENGTH
        return StopReason.EPISODE_TOKENS if self._episode_room() < 1 else StopReason.CONTEXT_LENGTH

    def admit(self, calls: int) -> StopReason | None:
        """Count `calls` tool calls, or give the limit that forbids them."""
        if self.limits.max_tool_calls is not None and self.calls + calls > self.limits.max_tool_calls:
            return StopReason.TOOL_CALLS
        self.calls += calls
        return None

    def judge(self, *, has_progress: bool) -> None:
        """A turn's calls have run; without progress every one of them failed or repeats an earlier one."""
        self.has_called = True
        self.idle_turns = 0 if has_progress else self.idle_turns + 1

    def _episode_room(self) -> int:
        if self.limits.max_episode_tokens is None:
            return self.limits.max_turn_tokens
        return self.limits.max_episode_tokens - self.sampled - self.reserved
