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
