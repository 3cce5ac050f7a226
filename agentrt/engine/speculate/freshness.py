"""Whether a draft model still fits the policy, and whether training it anew pays. Pure.

An update of the policy leaves a draft model behind. What it costs is acceptance, which is measured, never assumed: a draft
that is accepted as before is left alone.
"""

from typing import NamedTuple

ENOUGH = 50
"""Verifications of a version before anything is said of it."""
FELL_TO = 0.85
"""Of the accepted length before: from there down a draft is called stale."""


class Stale(NamedTuple):
    """A draft model stands less often than before the policy changed under it."""

    before: float
    """Accepted length: drafted ids that stood, per verification."""
    now: float


class Freshness:
    """Follows the accepted length of one draft model, version by version of the policy."""

    def __init__(self) -> None:
        self._verifications = self._accepted = 0
        self._best: float | None = None
        """The accepted length that this draft had with the policy it was made for."""
        self._is_told = False

    @property
    def accepted_length(self) -> float | None:
        """With the present policy; None before `ENOUGH` verifications."""
        return self._accepted / self._verifications if self._verifications >= ENOUGH else None

    def note(self, accepted: int) -> Stale | None:
        """A draft was verified, and so many of its ids stood. The first time that this shows it to be stale, it is said."""
        self._verifications += 1
        self._accepted += accepted
        now = self.accepted_length
        if now is None or self._best is None or self._is_told or now > FELL_TO * self._best:
            return None
        self._is_told = True
        return Stale(self._best, now)

    def renewed(self, *, is_refreshed: bool) -> None:
        """The policy changed, and with `is_refreshed` the draft model with it."""
        now = self.accepted_length
        if is_refreshed:
            self._best = None
        elif self._best is None:
            self._best = now
        self._verifications = self._accepted = 0
        self._is_told = False


class Balance(NamedTuple):
    """What a stale draft costs, and what it costs to train it again."""

    lost_seconds: float
    cost_seconds: float

    @property
    def is_due(self) -> bool:
        """Whether refreshing pays."""
        return self.lost_seconds > self.cost_seconds


def balance(before: float, now: float, tokens_to_come: int, step_seconds: float, cost_seconds: float) -> Balance:
    """Accepted lengths before the policy changed and now; ids that the policy will sample before its draft is of no more use.

    A verification gives its accepted ids and one more, so these ids take tokens / (1 + accepted length) steps.
    """
    steps_lost = tokens_to_come * (1 / (1 + now) - 1 / (1 + before))
    return Balance(max(steps_lost, 0.0) * step_seconds, cost_seconds)
