"""How many pages will be needed at once, if running sequences grow and end as expected. Pure.

Admission asks this before it lets a prompt in: pages that others free in time count as room, growth to come counts as use. What
it gets wrong costs a preemption, never a result.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Growth(NamedTuple):
    """A sequence from now on: after `delay` steps it gains an id a step, `steps` times, and then its pages are free."""

    tokens: int
    steps: int
    delay: int = 0


class Forecast:
    """The pages that sequences need as time goes on, and the most at one time with one more of them.

    `running` are there now. `returning`, in order of their delay, come back later: those that are back before a newcomer ends
    count beside it, until it ends at the latest.
    """

    def __init__(self, running: Sequence[Growth], returning: Sequence[Growth], page_size: int) -> None:
        self._num_running, self._page_size = len(running), page_size
        self._delays = [one.delay for one in returning]
        numbers = chain.from_iterable((*running, *returning))
        self._growths_S3 = np.fromiter(numbers, np.int64, 3 * (len(running) + len(returning))).reshape(-1, 3)
        self._end_T = self._growths_S3[:, 1] + self._growths_S3[:, 2]

    @property
    def at_most(self) -> int:
        """Pages that all of them would need if they ended at one time."""
        return int((-(-(self._growths_S3[:, 0] + self._growths_S3[:, 1]) // self._page_size)).sum())

    def back_before(self, newcomer: Growth) -> int:
        """How many of `returning`, the first ones, are back before a newcomer ends."""
        return bisect_left(self._delays, newcomer.delay + newcomer.steps)

    def peak_with(self, newcomer: Growth) -> int:
        """The most pages in use at one time if `newcomer` comes now. It is reached just before some sequence ends."""
        end, back = newcomer.delay + newcomer.steps, self.back_before(newcomer)
        there_S3 = self._growths_S3[: self._num_running + back]
        own = -(-(newcomer.tokens + newcomer.steps) // self._page_size)
        at_its_end = int(self._pages(there_S3, np.array([end])).sum()) + own
        if not len(self._growths_S3):
            return at_its_end
        running_T, returning_TB = self._needed
        with_it_T = returning_TB[:, back] + self._pages(np.array([newcomer]), self._end_T)[:, 0]
        return max(at_its_end, int((running_T + with_it_T * (self._end_T <= end)).max()))

    @cached_property
    def _needed(self) -> tuple[IntArray, IntArray]:
        """At every end: by those that run, and by the first 0, 1, 2 ... of those that return."""
        pages_TS = self._pages(self._growths_S3, self._end_T)
        returning_TB = np.zeros((len(self._end_T), len(self._delays) + 1), dtype=np.int64)
        pages_TS[:, self._num_running :].cumsum(axis=1, out=returning_TB[:, 1:])
        return pages_TS[:, : self._num_running].sum(axis=1), returning_TB

    def _pages(self, growths_S3: IntArray, at_T: IntArray) -> IntArray:
        """What each has at each time; nothing once it has ended."""
        tokens_S, steps_S, delay_S = growths_S3.T
        grown_TS = np.minimum(np.maximum(at_T[:, None] - delay_S, 0), steps_S)
        pages_TS = -(-(tokens_S + grown_TS) // self._page_size)
        held_TS: IntArray = pages_TS * (steps_S + delay_S >= at_T[:, None])
        return held_TS


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
        self._sorted: list[int] = []

    def add(self, number: int) -> None:
        self._recent.append(number)
        insort(self._sorted, number)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def above(self, floor: int, quantile: float) -> int | None:
        """A quantile of the numbers above `floor`; None if there is none, or if too few are known at all."""
        above = len(self._sorted) - (first := bisect_right(self._sorted, floor))
        if len(self._sorted) < ENOUGH or not above:
            return None
        return self._sorted[first + int(quantile * (above - 1))]


class Lengths:
    """Lengths of the turns that ended lately, and how much longer one that still runs may get."""

    def __init__(self) -> None:
        self._recent = Recent()

    def add(self, length: int) -> None:
        """A turn ended after `length` sampled ids."""
        self._recent.add(length)

    def left(self, sampled: int, max_tokens: int) -> int:
        """Ids that a turn with `sampled` ids is expected to sample still; at least 1, at most what its limit leaves."""
        limit = max(max_tokens - sampled, 1)
        length = self._recent.above(sampled, LONG)
        return limit if length is None else min(length - sampled, limit)


class Return(NamedTuple):
    """A conversation comes back from its tool in `steps` steps, with `tokens` new ids."""

    steps: int
    tokens: int


class Returns:
    """How conversations came back from their tools lately, and when one that is away will."""

    def __init__(self) -> None:
        self._steps, self._tokens = Recent(), Recent()

    def add(self, steps: int, tokens: int) -> None:
        """One came back after `steps` steps with `tokens` new ids."""
        self._steps.add(steps)
        self._tokens.add(tokens)

    def expected(self, waited: int) -> Return | None:
        """What to expect of one that is away for `waited` steps; None if it is away longer than any was, or few are known."""
        steps, tokens = self._steps.above(waited, MIDDLE), self._tokens.above(-1, LONG)
        return None if steps is None or tokens is None else Return(steps - waited, tokens)
