"""Who decodes in a simulated engine, and what each has gained that is not written down yet. Pure.

Sequences that decode gain an id in every step and are otherwise alike until one ends its turn or needs a page. So steps are
counted once for all of them, and the ids of a sequence are written down when its turn ends or when somebody looks.
"""

from collections import defaultdict
from collections.abc import KeysView, ValuesView

import numpy as np

from agentrt.engine.forecast import Int64Array, Lengths
from agentrt.engine.sequence import Sequence

ROWS = 64
"""That there is room for at first."""


class Member:
    """One that decodes. A step has the number of steps before it."""

    __slots__ = ("computed", "counted", "ends", "grows", "noted", "row", "sequence")

    def __init__(self, sequence: Sequence, row: int, step: int, ends: int, grows: int) -> None:
        self.sequence, self.row = sequence, row
        self.noted = self.counted = step
        """The first step whose id is not written down, and the first whose row is not counted as computed."""
        self.ends, self.grows = ends, grows
        """The step that ends its turn, and the next one that needs a further page."""
        self.computed = sequence.lease.computed - step
        """Ids whose KV it has; each step so far adds one."""


class Roster:
    """Those that decode and wait for no copy. All of them run in every step."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._members: dict[Sequence, Member] = {}
        self._counts_4N = np.zeros((4, ROWS), np.int64)
        """Of each its known and sampled ids, less the steps so far, its limit and its preemptions; the first are in use."""
        self._by_row: list[Member] = []
        self._ending: defaultdict[int, list[Member]] = defaultdict(list)
        self._growing: defaultdict[int, list[Member]] = defaultdict(list)
        self.step = self.pages = self._computed = self._noted = 0
        """Steps so far; pages of all members; ids computed before the first step; the sum of `Member.noted`."""

    @property
    def sequences(self) -> KeysView[Sequence]:
        return self._members.keys()

    @property
    def members(self) -> ValuesView[Member]:
        return self._members.values()

    def growths(self, lengths: Lengths, reserve_after: int) -> Int64Array:
        """What will become of each: a row as of `forecast.growths_of`."""
        return lengths.growths(self._counts_4N, len(self._by_row), self.step, reserve_after)

    @property
    def computed(self) -> int:
        """Ids of all members whose KV is there."""
        return self._computed + self.step * len(self._members)

    @property
    def unwritten(self) -> int:
        """Ids of all members that are not written down."""
        return self.step * len(self._members) - self._noted

    @property
    def growing(self) -> list[Member]:
        """Those that need a further page for the next step."""
        return self._growing.get(self.step, [])

    @property
    def num_alike(self) -> int:
        """Steps from now on up to the first that ends a turn, or the last before one that needs a page; nobody lacks one."""
        return min(min(self._ending) + 1, min(self._growing)) - self.step

    def ending(self, steps: int) -> list[Member]:
        """Those whose turns end with the last of so many steps."""
        return self._ending.get(self.step + steps - 1, [])

    def join(self, sequence: Sequence, left: int) -> None:
        """A sequence decodes from now on, for `left` steps."""
        lease, step = sequence.lease, self.step
        room = len(lease.pages) * self._page_size - lease.computed
        row = len(self._by_row)
        member = self._members[sequence] = Member(sequence, row, step, step + left - 1, step + room)
        if row == self._counts_4N.shape[1]:
            self._counts_4N = np.concatenate((self._counts_4N, np.zeros_like(self._counts_4N)), axis=1)
        counts = sequence.known - step, sequence.num_sampled - step, sequence.max_tokens, sequence.preemptions
        self._counts_4N[:, row] = counts
        self._by_row.append(member)
        self._ending[member.ends].append(member)
        self._growing[member.grows].append(member)
        self.pages += len(lease.pages)
        self._computed += member.computed
        self._noted += step

    def leave(self, sequence: Sequence) -> Member | None:
        """It does not decode any more; None if it did not."""
        member = self._members.pop(sequence, None)
        if member is not None:
            _remove(self._ending, member.ends, member)
            _remove(self._growing, member.grows, member)
            self.pages -= len(sequence.lease.pages)
            self._computed -= member.computed
            self._noted -= member.noted
            last = self._by_row.pop()
            if last is not member:
                self._by_row[member.row] = last
                self._counts_4N[:, member.row] = self._counts_4N[:, last.row]
                last.row = member.row
        return member

    def grow(self, member: Member) -> None:
        """It was given a page."""
        _remove(self._growing, member.grows, member)
        member.grows += self._page_size
        self._growing[member.grows].append(member)
        self.pages += 1

    def advance(self, steps: int) -> None:
        """So many steps were run, at most `num_alike`; nobody whose turn ended is a member."""
        self.step += steps
        assert self.step - 1 not in self._ending, "a turn went on beyond its end"
        assert self.step - 1 not in self._growing, "a row was computed without a page for it"

    def check(self) -> None:
        """Raise `AssertionError` if a sum is off, or a member in the wrong place."""
        members = self._members.values()
        assert self.pages == sum(len(one.sequence.lease.pages) for one in members), "pages are counted wrong"
        assert self.computed == sum(one.computed + self.step for one in members), "computed ids are counted wrong"
        assert self.unwritten == sum(self.step - one.noted for one in members), "ids not written are counted wrong"
        assert all(self._by_row[one.row] is one for one in members), "a member has the row of another"
        assert all(one in self._ending[one.ends] and one in self._growing[one.grows] for one in members)


def _remove(buckets: dict[int, list[Member]], step: int, member: Member) -> None:
    buckets[step].remove(member)
    if not buckets[step]:
        del buckets[step]
