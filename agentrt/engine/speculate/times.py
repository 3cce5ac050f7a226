"""What steps take: plain ones by their requests, and what rows of prompts and of drafts add. Pure; told what was measured.

The two are apart because rows of one sequence share what they attend, so four drafted rows cost less than four requests do.
What drafted rows add has all of it: the rows, their part of sampling, and taking back what did not stand.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from math import inf, log2
from typing import NamedTuple

SMOOTH = 0.05
"""What one measurement changes; more while there are few."""
FIRST = 4
"""Measurements of which the shortest counts: the first ones compile, and fill caches."""
KEPT = 0.98
"""Of what is known of a line, at each measurement."""
NOTHING = 0.1
"""What it counts that nothing takes no time, in measurements."""
RENEWED = 8
"""Measurements of one count after which the curve is made anew."""
OUTLIER = 3.0
"""Times what was expected: a step that took longer counts as that long, for the machine did something else meanwhile."""


class _Point(NamedTuple):
    """What is known of some counts."""

    times: int
    mean_count: float
    mean_seconds: float


class Curve:
    """Seconds by a count: means of what was measured, rising with the count, and a line between two counts.

    Counts within a fifth of each other share what is known.
    """

    def __init__(self) -> None:
        self._measured: dict[int, _Point] = {}
        """By half octave."""
        self._curve: tuple[list[float], list[float]] | None = None

    @property
    def is_known(self) -> bool:
        """Something was measured."""
        return bool(self._measured)

    def note(self, count: int, seconds: float) -> None:
        """So many took so long."""
        half_octave = _half_octave(count)
        times, mean_count, mean_seconds = self._measured.get(half_octave, (0, float(count), seconds))
        if times < FIRST:
            mean_seconds = min(mean_seconds, seconds)
        else:
            mean_seconds += max(SMOOTH, 1 / (times - FIRST + 2)) * (seconds - mean_seconds)
        mean_count += SMOOTH * (count - mean_count)
        self._measured[half_octave] = _Point(times + 1, mean_count, mean_seconds)
        if times < FIRST or times % RENEWED == 0:
            self._curve = None

    def measured(self, count: int) -> float:
        """Of about so many, as it was measured; infinite if it was not. Cheaper than `of`."""
        point = self._measured.get(_half_octave(count))
        return point.mean_seconds if point else inf

    def about(self, count: int) -> float:
        """`measured`, or else `of`."""
        seconds = self.measured(count)
        return seconds if seconds < inf else self.of(count)

    def of(self, count: float) -> float:
        """Of so many. Beyond the largest known count as steep as on average up to it; 1 if none is known."""
        counts, seconds = self._curve = self._curve or self._made()
        if not counts:
            return 1.0
        if count >= counts[-1]:
            return seconds[-1] + (seconds[-1] - seconds[0]) / max(counts[-1] - counts[0], 1.0) * (count - counts[-1])
        if count <= counts[0]:
            return seconds[0]
        place = bisect_left(counts, count)
        share = (count - counts[place - 1]) / (counts[place] - counts[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])

    def _made(self) -> tuple[list[float], list[float]]:
        """Counts, ascending, and their seconds."""
        points = [self._measured[key] for key in sorted(self._measured)]
        return [point.mean_count for point in points], _rising(points)


@cache
def _half_octave(count: int) -> int:
    return round(2 * log2(count))


def _rising(points: Sequence[_Point]) -> list[float]:
    """The seconds nearest to these that do not fall, by least squares (pool adjacent violators, Ayer et al. 1955)."""
    pools: list[tuple[float, float, int]] = []
    for point in points:
        mean, weight, size = point.mean_seconds, min(point.times, 1 / SMOOTH), 1
        while pools and pools[-1][0] >= mean:
            other_mean, other_weight, other_size = pools.pop()
            mean = (mean * weight + other_mean * other_weight) / (weight + other_weight)
            weight, size = weight + other_weight, size + other_size
        pools.append((mean, weight, size))
    return [mean for mean, _, size in pools for _ in range(size)]


class Line:
    """Seconds by a count, of measurements with much noise: something at all, and as much for each.

    Least squares, of which the last 50 or so measurements count, and a little that nothing takes no time. Neither part is
    below 0. The first measurement is left out, for it may have compiled something.
    """

    def __init__(self) -> None:
        self._times = 0
        self._parts: tuple[float, float] | None = None
        self._weight, self._n, self._nn, self._t, self._nt = NOTHING, 0.0, 0.0, 0.0, 0.0
        """Sums: of ones, counts, their squares, seconds, and counts times seconds."""

    @property
    def is_known(self) -> bool:
        """Something was measured."""
        return self._times > 1

    def note(self, count: int, seconds: float) -> None:
        """So many took so long."""
        self._times += 1
        self._parts = None
        if self.is_known:
            self._weight = NOTHING + KEPT * (self._weight - NOTHING) + 1
            self._n, self._nn = KEPT * self._n + count, KEPT * self._nn + count * count
            self._t, self._nt = KEPT * self._t + seconds, KEPT * self._nt + count * seconds

    def of(self, count: float) -> float:
        """Of so many; 0 of none."""
        always, each = self.parts()
        return always + each * count if count else 0.0

    def parts(self) -> tuple[float, float]:
        """What any take at all, and what each takes."""
        if self._parts is None:
            self._parts = self._fitted()
        return self._parts

    def _fitted(self) -> tuple[float, float]:
        spread = self._nn * self._weight - self._n * self._n
        each = (self._nt * self._weight - self._n * self._t) / spread if spread else 0.0
        always = (self._t - each * self._n) / self._weight
        if each < 0:
            return max(self._t / self._weight, 0.0), 0.0
        if always < 0:
            return 0.0, max(self._nt / self._nn, 0.0)
        return always, each


class StepTimes:
    """Of an engine's steps in which something decodes."""

    def __init__(self) -> None:
        self.plain = Curve()
        """By requests that decode, without drafts and prompts."""
        self.prompts = Line()
        """By rows of prompts: what they add. Where turns are short most steps have some."""
        self.drafted = Line()
        """By drafted rows of all requests together: what they add."""

    @property
    def is_known(self) -> bool:
        """What drafts add to a step, and what there is without them."""
        return self.plain.is_known and self.drafted.is_known

    def row(self) -> float:
        """What a drafted row adds; no less than a row of a prompt, which needs no logits."""
        return max(self.drafted.parts()[1], self.prompts.parts()[1] if self.prompts.is_known else 0.0)

    def added(self, drafted: int) -> float:
        """What so many drafted rows add."""
        return max(self.drafted.of(drafted), drafted * self.row())

    def note(self, requests: int, drafted: int, seconds: float, prompt_rows: int = 0) -> None:
        """A step took so long, in which so many requests decoded. What rows add is known only once what they add to is."""
        if not drafted and not prompt_rows:
            self.plain.note(requests, min(seconds, OUTLIER * self.plain.measured(requests)))
            return
        added, beside = (self.drafted, self.prompts.of(prompt_rows)) if drafted else (self.prompts, 0.0)
        if self.plain.is_known and (not drafted or not prompt_rows or self.prompts.is_known):
            beside += self.plain.about(requests)
            rows = drafted or prompt_rows
            most = OUTLIER * (beside + added.of(rows)) if added.is_known else inf
            added.note(rows, min(seconds, most) - beside)
