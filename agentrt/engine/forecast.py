"""How many pages will be needed at once, if running sequences grow and end as expected. Pure.

Admission asks this before it lets a prompt in: pages that others free in time count as room, growth to come counts as use. What
it gets wrong costs a preemption, never a result.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Growth(NamedTuple):
    """A sequence from now on: after `delay` steps it gains an id a step, `steps` times, and then its pages are free."""

    tokens: int
    steps: int
    delay: int = 0


def peak_pages(growths: Sequence[Growth], page_size: int) -> int:
    """The largest number of pages in use at one time. It is reached just before some sequence ends."""
    if not growths:
        return 0
    tokens_S, steps_S, delay_S = np.array(growths, dtype=np.int64).T
    end_S = delay_S + steps_S
    grown_TS = np.clip(end_S[:, None] - delay_S, 0, steps_S)
    pages_TS = -(-(tokens_S + grown_TS) // page_size)
    return int((pages_TS * (end_S >= end_S[:, None])).sum(axis=1).max())


WINDOW = 512
"""Turns that are remembered."""
ENOUGH = 32
"""Turns after which their lengths say more than `max_tokens` does."""
QUANTILE = 0.9
"""Of the lengths seen, beyond what a turn has already: long turns hold pages longest."""


class Lengths:
    """Lengths of the turns that ended lately, and how much longer one that still runs may get."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        """A turn ended after `length` sampled ids."""
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def left(self, sampled: int, max_tokens: int) -> int:
        """Ids that a turn with `sampled` ids is expected to sample still; at least 1, at most what its limit leaves."""
        limit = max(max_tokens - sampled, 1)
        longer = len(self._sorted) - (first := bisect_right(self._sorted, sampled))
        if len(self._sorted) < ENOUGH or not longer:
            return limit
        return min(self._sorted[first + int(QUANTILE * (longer - 1))] - sampled, limit)
