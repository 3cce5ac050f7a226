"""What the core remembers of conversations between two turns: who came first, and which will come back from a tool. Pure.

Time is counted in steps, the unit that admission forecasts in: while no step runs, nobody waits for one.
"""

from dataclasses import dataclass

from agentrt.engine.forecast import Growth, Lengths, Returns
from agentrt.engine.kv.lease import Lease
from agentrt.engine.readiness import Readiness
from agentrt.engine.scheduler import Returning
from agentrt.engine.sequence import Sequence


@dataclass(slots=True)
class _Rest:
    """A conversation after a turn."""

    place: float
    """When it came: its place among those of the same rank."""
    tokens: int
    max_tokens: int
    """Of the last turn: the next is expected to have as many."""
    paused: int = -1
    """The step in which its tool began; -1 if none runs."""


class Conversations:
    """Told what happens to leases; says who is expected back. A conversation keeps its rank over a tool call."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness
        self._resting: dict[Lease, _Rest] = {}
        self._returns = Returns()

    def turn_ended(self, sequence: Sequence) -> None:
        """A turn is over, in whatever way."""
        self._resting[sequence.lease] = _Rest(sequence.rank[-1], len(sequence.tokens), sequence.max_tokens)

    def pause(self, lease: Lease, step: int) -> None:
        """A tool runs for this conversation from now on."""
        if rest := self._resting.get(lease):
            rest.paused = step

    def come(self, sequence: Sequence, now: float, step: int) -> None:
        """A request was made: give it its rank. After a tool call it has the place of the turn before."""
        rest = self._resting.pop(sequence.lease, None)
        if rest is None or rest.paused < 0:
            self.rank(sequence, now)
            return
        self.rank(sequence, rest.place)
        self._returns.add(step - rest.paused, len(sequence.tokens) - rest.tokens)

    def rank(self, sequence: Sequence, place: float) -> None:
        """Rank a request that came at `place`."""
        lease = sequence.lease
        sequence.rank = self._readiness.rank(lease.hints, len(sequence.tokens), place)
        lease.take_place(sequence.rank)

    def forget(self, lease: Lease) -> None:
        """The conversation is over."""
        rest = self._resting.pop(lease, None)
        if rest is not None:
            self._readiness.ended(lease.hints.group, rest.tokens)

    def returning(self, step: int, lengths: Lengths) -> dict[Lease, Returning]:
        """Those that keep pages while their tool runs and are expected back, the soonest first."""
        expected, tokens = dict[Lease, Returning](), self._returns.tokens
        if tokens is None:
            return expected
        for lease, rest in self._resting.items():
            if rest.paused < 0 or not lease.pages:
                continue
            if (steps := self._returns.steps(step - rest.paused)) is not None:
                growth = Growth(rest.tokens + tokens, lengths.left(0, rest.max_tokens), steps)
                expected[lease] = Returning(growth, len(lease.pages))
        return dict(sorted(expected.items(), key=lambda item: item[1].growth.delay))
