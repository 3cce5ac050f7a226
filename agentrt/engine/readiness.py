"""In which order conversations are served, so that what is wanted is ready soonest. Pure.

    arrival        who came first; a turn after a tool call has the place of the turn before it
    synchronous    the trainer waits for all: the longest predicted remainder first, since the last to end decides
    asynchronous   the trainer takes groups as they become whole: the oldest policy version first, before it is too old, then
                   groups of which few members are left

How long a conversation will be is told by those of its group that have ended; by all that have, before one has.
"""

from collections import defaultdict

from agentrt.core.protocol import SessionHints
from agentrt.core.spec import ServiceOrder
from agentrt.engine.kv.lease import Rank

MOST_GROUPS = 4096


class Mean:
    """Of what was added."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = self.total = 0

    def add(self, number: int) -> None:
        self.count, self.total = self.count + 1, self.total + number

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


class Readiness:
    """Told how long conversations were; ranks those that go on."""

    def __init__(self, order: ServiceOrder) -> None:
        self._order = order
        self._all, self._groups = Mean(), defaultdict[str, Mean](Mean)

    def ended(self, group: str, tokens: int) -> None:
        """A conversation is over, with so many ids."""
        self._all.add(tokens)
        if group and (group in self._groups or len(self._groups) < MOST_GROUPS):
            self._groups[group].add(tokens)

    def rank(self, hints: SessionHints, tokens: int, arrived: float) -> Rank:
        """Of a conversation with `tokens` ids so far, whose place in the line is from `arrived`."""
        match self._order:
            case "arrival":
                return (arrived,)
            case "synchronous":
                return -self.left(hints.group, tokens), arrived
            case "asynchronous":
                version = float("inf") if hints.oldest_version is None else hints.oldest_version
                return version, hints.members_left or float("inf"), arrived

    def left(self, group: str, tokens: int) -> float:
        """Ids that a conversation is expected to gain still."""
        known = self._groups.get(group, self._all)
        return max(known.value - tokens, 0.0)
