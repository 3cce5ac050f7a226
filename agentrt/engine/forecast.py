"""How many pages will be needed at once, if running sequences grow and end as expected. Pure.

Admission asks this before it lets a prompt in: pages that others free in time count as room, growth to come counts as use. What
it gets wrong costs a preemption, never a result.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrt.engine import occupancy

Int64Array = NDArray[np.int64]


class Growth(NamedTuple):
    """A sequence from now on: after `delay` steps it gains an id a step, `steps` times, and then its pages are free."""

    tokens: int
    steps: int
    delay: int = 0


def growths_of(growths: Iterable[Growth]) -> Int64Array:
    """As an array: a row for each."""
    return np.fromiter(chain.from_iterable(growths), np.int64).reshape(-1, 3)


NO_GROWTHS = growths_of(())


class Forecast:
    """The pages that sequences need as time goes on, and the most at one time with one more of them.

    `crew_S3` and `others` are there now. `returning`, in order of their delay, come back later: those that are back before a
    newcomer ends count beside it, until it ends at the latest.
    """

    def __init__(
        self, crew_S3: Int64Array, others: Sequence[Growth], returning: Sequence[Growth], page_size: int
    ) -> None:
        self._num_running, self._page_size = len(crew_S3) + len(others), page_size
        self._delays = [one.delay for one in returning]
        self._growths_S3 = np.concatenate((crew_S3, growths_of((*others, *returning))))

    @property
    def at_most(self) -> int:
        """Pages that all of them would need if they ended at one time."""
        return int(occupancy.at_most(self._growths_S3, self._page_size))

    def back_before(self, newcomer: Growth) -> int:
        """How many of `returning`, the first ones, are back before a newcomer ends."""
        return bisect_left(self._delays, newcomer.delay + newcomer.steps)

    def peak_with(self, newcomer: Growth) -> int:
        """The most pages in use at one time if `newcomer` comes now."""
        back, size = self.back_before(newcomer), self._page_size
        return int(occupancy.peak(self._growths_S3, self._at_ends, self._num_running, back, tuple(newcomer), size))

    @cached_property
    def _at_ends(self) -> Int64Array:
        pages_SB: Int64Array = occupancy.at_ends(self._growths_S3, self._num_running, self._page_size)
        return pages_SB


WINDOW = 512
"""Turns and returns that are remembered."""
ENOUGH = 32
"""Of them, after which they say more than a limit does."""
LONG, MIDDLE = 0.9, 0.5
"""Quantiles. A turn is taken to be long, because long turns hold pages longest; a tool to take a middling time."""


class Recent:
    """The last numbers of a kind, and what is to be expected of one that is above some number already."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted = array("q")
        self._answers: dict[tuple[int, float], int | None] = {}
        """Of `above`, since the last number came."""

    def add(self, number: int) -> None:
        self._recent.append(number)
        insort(self._sorted, number)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]
        self._answers.clear()

    def above(self, floor: int, quantile: float) -> int | None:
        """A quantile of the numbers above `floor`; None if there is none, or if too few are known at all."""
        asked = floor, quantile
        if asked not in self._answers:
            first = bisect_right(self._sorted, floor)
            above = len(self._sorted) - first
            is_known = len(self._sorted) >= ENOUGH and above > 0
            self._answers[asked] = self._sorted[first + int(quantile * (above - 1))] if is_known else None
        return self._answers[asked]

    @property
    def in_order(self) -> Int64Array:
        """The numbers in order, if enough are known, else none."""
        return np.frombuffer(self._sorted, np.int64) if len(self._sorted) >= ENOUGH else np.empty(0, np.int64)


class Lengths:
    """Lengths of the turns that ended lately, and how much longer one that still runs may get."""

    def __init__(self) -> None:
        self._recent = Recent()
        self._left: dict[tuple[int, int], int] = {}
        """Answers of `left`, since the last turn ended."""

    def add(self, length: int) -> None:
        """A turn ended after `length` sampled ids."""
        self._recent.add(length)
        self._left.clear()

    def left(self, sampled: int, max_tokens: int) -> int:
        """Ids that a turn with `sampled` ids is expected to sample still; at least 1, at most what its limit leaves."""
        left = self._left.get((sampled, max_tokens))
        if left is None:
            limit, length = max(max_tokens - sampled, 1), self._recent.above(sampled, LONG)
            left = self._left[sampled, max_tokens] = limit if length is None else min(length - sampled, limit)
        return left

    def growths(self, counts_4N: Int64Array, count: int, step: int, reserve_after: int) -> Int64Array:
        """`left` of many, as a row of a `Growth` for each; see `occupancy.growths`."""
        growths_S3: Int64Array = occupancy.growths(counts_4N, count, step, self._recent.in_order, LONG, reserve_after)
        return growths_S3


class Returns:
    """How conversations came back from their tools lately, and when one that is away will."""

    def __init__(self) -> None:
        self._steps, self._tokens = Recent(), Recent()

    def add(self, steps: int, tokens: int) -> None:
        """One came back after `steps` steps with `tokens` new ids."""
        self._steps.add(steps)
        self._tokens.add(tokens)

    @property
    def tokens(self) -> int | None:
        """New ids that one is expected to bring; None if few are known."""
        return self._tokens.above(-1, LONG)

    def steps(self, waited: int) -> int | None:
        """Until one is back that is away for `waited` steps; None if it is away longer than any was, or few are known."""
        steps = self._steps.above(waited, MIDDLE)
        return None if steps is None else steps - waited
