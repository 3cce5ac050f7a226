"""`Outlook`: when the calls of a turn will all be done, from what they say of their progress.

Pure. What a tool says is hostile: it can be wrong and there can be much of it, so a say is bounded by what the call may take
at all, and those who listen hear seldom.
"""

from agentrt.sandbox.reply import Progress

MIN_GAP_SECONDS = 0.1
"""Between two words to the engine."""


class Outlook:
    """Of one turn's calls, which began at `started` and are ended `seconds` later at the latest."""

    __slots__ = ("_ends", "_latest", "_said", "_started")

    def __init__(self, started: float, seconds: float) -> None:
        self._started, self._latest = started, started + seconds
        self._ends: dict[int, float] = {}
        self._said = -MIN_GAP_SECONDS

    def hear(self, call: int, progress: Progress, now: float) -> float | None:
        """Seconds until the last of the calls that have said something is done; None if that is no news.

        Of a call that says how far it is and not how long it takes, what is left goes on as fast as what is done.
        """
        left = progress.eta_s
        if left is None and progress.progress:
            left = (now - self._started) * (1 - progress.progress) / progress.progress
        if left is None:
            return None
        self._ends[call] = min(now + left, self._latest)
        if now - self._said < MIN_GAP_SECONDS:
            return None
        self._said = now
        return max(0.0, max(self._ends.values()) - now)

    def forget(self, call: int) -> None:
        """A call that has ended is waited for no more."""
        self._ends.pop(call, None)
