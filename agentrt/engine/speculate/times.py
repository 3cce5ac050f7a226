"""What steps take: plain ones by their requests, and what drafted rows add to them. Pure; it is told what was measured.

The two are apart because rows of one sequence share what they attend, so four drafted rows cost less than four requests do.
What drafted rows add has all of it: the rows, their part of sampling, and taking back what did not stand.
"""

from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrt_kernels.compiled import ordered

SMOOTH = 0.1
"""What one measurement changes."""
FIRST = 4
"""Measurements of which the shortest counts: the first ones compile, and fill caches."""
OUTLIER = 3.0
"""Times what was expected: a step that took longer counts as that long, for the machine did something else meanwhile."""


class Curve:
    """Seconds by a count: means of what was measured, never more than a larger count takes, and a line between two counts.

    Counts within a fifth of each other share what is known.
    """

    def __init__(self, *, from_zero: bool = False) -> None:
        """With `from_zero` nothing takes no time."""
        self._zero = [(0.0, 0.0)] if from_zero else []
        self._measured: dict[int, tuple[int, float, float]] = {}
        """By half octave: how many there were at first, the mean count and the mean of its seconds."""
        self._curve: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    @property
    def is_known(self) -> bool:
        """Something was measured."""
        return bool(self._measured)

    def note(self, count: int, seconds: float) -> None:
        """So many took so long."""
        half_octave = round(2 * log2(count))
        times, mean_count, mean_seconds = self._measured.get(half_octave, (0, float(count), seconds))
        if times < FIRST:
            mean_seconds = min(mean_seconds, seconds)
        else:
            mean_seconds += SMOOTH * (seconds - mean_seconds)
        mean_count += SMOOTH * (count - mean_count)
        self._measured[half_octave] = (min(times + 1, FIRST), mean_count, mean_seconds)
        self._curve = None

    def curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Counts, ascending, and their seconds, none below 0."""
        if self._curve is None:
            points = self._zero + [self._measured[key][1:] for key in sorted(self._measured)]
            count_P, seconds_P = np.array(points).reshape(-1, 2).T
            rising_P = np.minimum.accumulate(seconds_P[::-1])[::-1]
            self._curve = count_P.copy(), np.maximum(rising_P, 0.0)
        return self._curve

    def of(self, count: float) -> float:
        """Of so many. Beyond the largest known count as steep as on average up to it; 1 if none is known."""
        return float(seconds_of(count, *self.curve()))


@ordered()
def seconds_of(count: float, count_P: Any, seconds_P: Any) -> Any:
    """`Curve.of`, of a curve."""
    known = count_P.shape[0]
    if known == 0:
        return 1.0
    if count >= count_P[known - 1]:
        slope = (seconds_P[known - 1] - seconds_P[0]) / max(count_P[known - 1] - count_P[0], 1.0)
        return seconds_P[known - 1] + slope * (count - count_P[known - 1])
    if count <= count_P[0]:
        return seconds_P[0]
    place = np.searchsorted(count_P, count)
    share = (count - count_P[place - 1]) / (count_P[place] - count_P[place - 1])
    return seconds_P[place - 1] + share * (seconds_P[place] - seconds_P[place - 1])


class StepTimes:
    """Of an engine's steps that only decode."""

    def __init__(self) -> None:
        self.plain = Curve()
        """By requests, without drafts."""
        self.drafted = Curve(from_zero=True)
        """By drafted rows of all requests together: what they add."""

    @property
    def is_known(self) -> bool:
        """Both have been measured."""
        return self.plain.is_known and self.drafted.is_known

    def note(self, requests: int, drafted: int, seconds: float) -> None:
        """A step took so long. What drafts add is known only once plain steps are."""
        plain = self.plain.of(requests)
        if self.is_known or (self.plain.is_known and not drafted):
            seconds = min(seconds, OUTLIER * (plain + self.drafted.of(drafted)))
        if not drafted:
            self.plain.note(requests, seconds)
        elif self.plain.is_known:
            self.drafted.note(drafted, seconds - plain)
