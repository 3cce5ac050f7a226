"""How long tools take, learned from their calls: by tool, and within a tool by the class of its arguments. Pure.

What is asked is always how long a call that runs already will go on. A call that was ended from outside (a time limit, a
cancelled episode) says only that it would have taken longer: it is right-censored. Durations are counted in bins whose edges
grow by 2^(1/4). The estimate is the posterior mean of a beta process (Hjort 1990) whose prior is what is known of all calls of
the tool, theirs what is known of all tools: with d ended and n at risk in a bin, prior survival s0 to s1 over it and K calls'
worth of prior, the hazard is (d + K (s0 - s1)) / (n + K s0). Without a prior that is Kaplan and Meier's estimate, and without
censored calls the share of calls that took longer.
"""

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol, Self

FIRST_SECONDS, BINS_PER_DOUBLING, DOUBLINGS = 0.001, 4, 24
EDGES = (0.0, *(FIRST_SECONDS * 2 ** (k / BINS_PER_DOUBLING) for k in range(BINS_PER_DOUBLING * DOUBLINGS + 1)))
"""Of the bins, in seconds: the last is at 4.7 hours. What takes longer is taken to take for ever."""
NUM_BINS = len(EDGES) - 1
WINDOW = 512
"""Calls of a class that are remembered, the last ones."""
PRIOR_CALLS = 8.0
"""How many calls of its own outweigh what a class has from its prior."""
NEWS = 1 / 32
"""An estimate is made anew when this share of the calls behind it is new."""
MOST_CLASSES = 1024
"""Names come from outside: of the classes after so many others, only their calls' place among all calls is known."""
ETA_FACTOR = 2.0
"""A tool that says how long it still takes is believed to within this factor."""


class Remaining(Protocol):
    """How much longer one call takes, as a distribution. Seconds from now."""

    def outlasts(self, seconds: float) -> float:
        """The probability that it takes longer than `seconds`."""

    def within(self, seconds: float) -> float:
        """The expected time until it ends or `seconds` have passed; `math.inf` asks for all of its expected time."""

    def held(self, seconds: float) -> tuple[float, float]:
        """`within` and `outlasts` of so many seconds, in one."""


class Curve(NamedTuple):
    """The distribution of a duration, by its values at `EDGES`; straight lines between them."""

    survival: tuple[float, ...]
    """The probability to take longer; 1 at the first edge, and it never grows."""
    area: tuple[float, ...]
    """The integral of `survival` from 0."""

    @classmethod
    def of(cls, survival: tuple[float, ...]) -> Self:
        """The curve with these values at `EDGES`."""
        widths = (high - low for low, high in pairwise(EDGES))
        means = ((first + last) / 2 for first, last in pairwise(survival))
        return cls(survival, (0.0, *accumulate(width * mean for width, mean in zip(widths, means, strict=True))))

    def at(self, seconds: float) -> tuple[float, float]:
        """The probability to take longer than `seconds`, and its integral from 0 to there."""
        at = bin_of(seconds)
        if at >= NUM_BINS:
            return self.survival[-1], self.area[-1] + (
                self.survival[-1] * (seconds - EDGES[-1]) if self.survival[-1] else 0.0
            )
        first, passed = self.survival[at], seconds - EDGES[at]
        survival = first + passed / (EDGES[at + 1] - EDGES[at]) * (self.survival[at + 1] - first)
        return survival, self.area[at] + passed * (first + survival) / 2


def bin_of(seconds: float) -> int:
    """The bin that holds a duration; `NUM_BINS` for one beyond the last edge."""
    return bisect_right(EDGES, seconds) - 1


UNKNOWN = Curve.of(tuple(1 / (1 + edge) for edge in EDGES))
"""Of a call of which nothing is known: half of them take longer than a second, and one that has run for t seconds goes on for
about as long again (Lindy's rule)."""


class Durations:
    """The last calls of one class."""

    __slots__ = ("_at_risk", "_calls", "_curve", "_ended", "_news", "_prior")

    def __init__(self, prior: "Durations | Curve" = UNKNOWN) -> None:
        self._prior = prior
        self._calls: deque[tuple[int, bool]] = deque()
        self._ended, self._at_risk = [0] * NUM_BINS, [0] * (NUM_BINS + 1)
        """By bin: calls that ended in it; calls whose last known moment is in it, whether they ended there or not."""
        self._curve: Curve | None = None
        self._news = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, seconds: float, *, is_cut: bool = False) -> None:
        """A call took `seconds`; if it `is_cut`, it was ended then and would have taken longer."""
        call = bin_of(max(seconds, 0.0)), is_cut or seconds >= EDGES[-1]
        self._calls.append(call)
        self._count(call, 1)
        if len(self._calls) > WINDOW:
            self._count(self._calls.popleft(), -1)
        self._news += 1

    @property
    def curve(self) -> Curve:
        """The estimate, of which little more than `NEWS` of the calls behind it are missing."""
        if self._curve is None or self._news > NEWS * len(self._calls):
            prior = self._prior.curve if isinstance(self._prior, Durations) else self._prior
            self._curve, self._news = self.posterior(prior, PRIOR_CALLS), 0
        return self._curve

    def posterior(self, prior: Curve, prior_calls: float) -> Curve:
        """What the calls say of a distribution that was taken to be `prior`, on which so many calls would weigh as much."""
        survival, at_risk = [1.0], float(len(self._calls))
        for at, (before, after) in enumerate(pairwise(prior.survival)):
            weight = at_risk + prior_calls * before
            ended = self._ended[at] + prior_calls * (before - after)
            survival.append(survival[-1] * max(1 - ended / weight, 0.0) if weight > 0 else survival[-1])
            at_risk -= self._at_risk[at]
        return Curve.of(tuple(survival))

    def _count(self, call: tuple[int, bool], sign: int) -> None:
        at, is_cut = call
        self._at_risk[at] += sign
        if not is_cut:
            self._ended[at] += sign


class Measured:
    """What is left of a call that has run for `elapsed` seconds and is ended in `limit` seconds at the latest."""

    __slots__ = ("_alive", "_area", "_curve", "_elapsed", "_limit")

    def __init__(self, curve: Curve, elapsed: float, limit: float = math.inf) -> None:
        self._curve, self._elapsed, self._limit = curve, elapsed, limit
        self._alive, self._area = curve.at(elapsed)

    def outlasts(self, seconds: float) -> float:
        """See `Remaining`."""
        return self.held(seconds)[1]

    def within(self, seconds: float) -> float:
        """See `Remaining`. Without a limit it is infinite where there is no telling that the call ends at all."""
        return self.held(seconds)[0]

    def held(self, seconds: float) -> tuple[float, float]:
        """See `Remaining`."""
        is_over = seconds >= self._limit
        seconds = max(min(seconds, self._limit), 0.0)
        if not self._alive:
            return seconds, 0.0 if is_over else 1.0
        survival, area = self._curve.at(self._elapsed + seconds)
        return (area - self._area) / self._alive, 0.0 if is_over else survival / self._alive


@dataclass(frozen=True, slots=True)
class Foretold:
    """What is left of a call that says it takes `eta` seconds: log-uniform between `eta` / `ETA_FACTOR` and `eta` times it."""

    eta: float
    limit: float = math.inf

    def outlasts(self, seconds: float) -> float:
        """See `Remaining`."""
        soonest, latest = self.eta / ETA_FACTOR, self.eta * ETA_FACTOR
        if seconds >= min(self.limit, latest):
            return 0.0
        return 1.0 if seconds <= soonest else math.log(latest / seconds) / math.log(latest / soonest)

    def within(self, seconds: float) -> float:
        """See `Remaining`."""
        soonest, latest = self.eta / ETA_FACTOR, self.eta * ETA_FACTOR
        seconds = max(min(seconds, self.limit, latest), 0.0)
        if seconds <= soonest:
            return seconds
        grown = seconds * (math.log(latest / seconds) + 1) - soonest * (math.log(latest / soonest) + 1)
        return soonest + grown / math.log(latest / soonest)

    def held(self, seconds: float) -> tuple[float, float]:
        """See `Remaining`."""
        return self.within(seconds), self.outlasts(seconds)


class ToolTimes:
    """Of all tools. Told how long calls took; says what is left of one that runs."""

    def __init__(self) -> None:
        self._all = Durations()
        self._tools: dict[str, Durations] = {}
        self._classes: dict[tuple[str, str], Durations] = {}

    def add(self, tool: str, arguments: str, seconds: float, *, is_cut: bool = False) -> None:
        """A call of this tool, with arguments of this class, took `seconds`, or was ended then (`is_cut`)."""
        if tool not in self._tools and len(self._tools) < MOST_CLASSES:
            self._tools[tool] = Durations(self._all)
        if arguments and tool in self._tools and len(self._classes) < MOST_CLASSES:
            self._classes.setdefault((tool, arguments), Durations(self._tools[tool]))
        for durations in (self._classes.get((tool, arguments)), self._tools.get(tool), self._all):
            if durations is not None:
                durations.add(seconds, is_cut=is_cut)

    def remaining(
        self, tool: str, arguments: str, elapsed: float, *, eta: float | None = None, deadline: float | None = None
    ) -> Remaining:
        """What is left of a call that has run for `elapsed` seconds. `eta` is its own word on that, of which nothing is
        believed once it is past; `deadline` says when it is ended at the latest. Both in seconds from now."""
        limit = math.inf if deadline is None else max(deadline, 0.0)
        if eta is not None and eta > 0:
            return Foretold(max(eta, FIRST_SECONDS), limit)
        durations = self._classes.get((tool, arguments), self._tools.get(tool, self._all))
        return Measured(durations.curve, elapsed, limit)
