"""The gate: how much of each draft a step verifies, if any. Pure; it is told what steps took and what was accepted.

A request whose drafts are verified gains 1 + sum over depths j of a^j ids a step (a: how often such an id was accepted
until now), and is done in so many fewer steps. The gate weighs the time until all running requests are done, if each has
equally much to say: a step takes what steps of so many rows were seen to take, and becomes cheaper as requests end. So
fast ones do not pay for the whole batch when slow ones hold it up. Who has a draft changes from step to step, though, so
half of a gain counts as everybody's. It takes the drafts with which that time is
shortest, each request its own number of ids, and none unless they save 3 % against plain decoding, the look for them
included. After a look in vain it sleeps so long that such looks cost 1 % of the time, and what it knows does not grow
old: one step in 64 is plain though drafts would pay, and one in 512 verifies some though they would not.

Whether an id is likely comes from past acceptances of its class only, a class being what the proposer saw *before* it chose.
The chance of the very id that was drawn must not play a part: a draft cut short because its id is unlikely biases the text
(under `rejection`; `coupled` cannot be biased).
"""

from collections import defaultdict
from collections.abc import Sequence
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrt_kernels.compiled import ordered

OFF_UNDER = 1.03
"""The time of plain decoding over that with drafts."""
SURVIVALS_T = np.array([0.9, 0.75, 0.6, 0.45, 0.35, 0.25, 0.15, 0.07])
"""Down to which drafts may be taken."""
FORGET = 0.98
"""Of what is known about a class, at each verification of it: the last 50 or so count."""
PRIOR_ACCEPTED, PRIOR_TRIED = 1.4, 2.0
"""What is assumed of a class before anything is known: good enough to be tried."""
REQUEST_PRIOR = 4.0
"""Ids of its class that count as a request's own, so that one with few ids is judged by its class."""
VAIN_SHARE = 0.01
"""Of the time, for looks in vain."""
LONGEST_SLEEP = 512
PLAIN_EVERY, PROBE_EVERY = 64, 512
"""Steps after which one is plain, and after which drafts are verified that do not seem to pay."""
PROBE_LENGTH = 2
SMOOTH_LONGER, SMOOTH_SHORTER = 0.1, 0.5
"""What one measurement changes."""


class Rate:
    """How often a drafted id was accepted lately, given that all before it were."""

    __slots__ = ("accepted", "tried")

    def __init__(self) -> None:
        self.accepted = self.tried = 0.0

    def note(self, proposed: int, accepted: int) -> None:
        """A draft of `proposed` ids was verified; the first `accepted` of them stood."""
        self.accepted = FORGET * self.accepted + accepted
        self.tried = FORGET * self.tried + min(accepted + 1, proposed)

    def mean(self, prior: float = PRIOR_ACCEPTED / PRIOR_TRIED, weight: float = PRIOR_TRIED) -> float:
        """The share, with `weight` ids of the share `prior` before any was seen."""
        return (self.accepted + weight * prior) / (self.tried + weight)


class StepTimes:
    """Seconds of a step by its rows: as measured, a line between two counts, never more than a larger count takes.

    Counts within a fifth of each other share what is known. A measurement can be too long, when the machine was busy with
    something else, and hardly too short, so a shorter time counts more than a longer one.
    """

    def __init__(self) -> None:
        self._measured: dict[int, tuple[float, float]] = {}
        """Rows and seconds by half octave, both smoothed."""
        self._curve: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def note(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took so long."""
        half_octave = round(2 * log2(rows))
        mean_rows, mean_seconds = self._measured.get(half_octave, (rows, seconds))
        share = SMOOTH_LONGER if seconds > mean_seconds else SMOOTH_SHORTER
        self._measured[half_octave] = (
            mean_rows + share * (rows - mean_rows), mean_seconds + share * (seconds - mean_seconds)
        )  # fmt: skip
        self._curve = None

    def curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Numbers of rows, ascending, and their seconds, which never fall; empty if nothing is known."""
        if self._curve is None:
            rows_P, seconds_P = np.array([self._measured[key] for key in sorted(self._measured)]).reshape(-1, 2).T
            self._curve = rows_P.copy(), np.minimum.accumulate(seconds_P[::-1])[::-1].copy()
        return self._curve

    def of(self, rows: float) -> float:
        """Of so many rows. Beyond the largest known count as steep as on average up to it; 1 if none is known."""
        return float(_seconds(rows, *self.curve()))


def survivals(rate: float, length: int) -> float:
    """How many of `length` drafted ids are expected to stand, each with a chance of `rate` if all before it do."""
    return rate * (1 - rate**length) / (1 - rate) if rate < 1 else float(length)


def choose_lengths(
    limits: Sequence[int], rates: Sequence[float], times: StepTimes, look_seconds: float = 0.0,
    modelled: Sequence[int] = (), pass_seconds: float = 0.0,
) -> list[int]:  # fmt: skip
    """How many ids of each draft to verify in a step of so many requests; all 0 if that saves less than 3 %.

    `limits` are the drafts' lengths, 0 for a request without one; `rates` the chance of an id of each. Ids are taken down to
    one survival a^j for all requests, so rows are spent where they bring most. To look for drafts takes `look_seconds`
    a step, which plain decoding does not, and a model takes `pass_seconds` for each id of the longest draft that it makes
    for the requests `modelled`.
    """
    lengths_S = np.zeros(len(limits), dtype=np.int64)
    if any(limits):
        is_modelled_S = np.zeros(len(limits), dtype=np.bool_)
        is_modelled_S[list(modelled)] = True
        limits_S, rates_S = np.array(limits, dtype=np.int64), np.array(rates, dtype=np.float64)
        _choose(limits_S, rates_S, is_modelled_S, *times.curve(), look_seconds, pass_seconds, lengths_S)
    lengths: list[int] = lengths_S.tolist()
    return lengths


@ordered()
def _choose(
    limits_S: Any, rates_S: Any, is_modelled_S: Any, rows_P: Any, seconds_P: Any, look_seconds: float, pass_seconds: float,
    best_S: Any,
) -> None:  # fmt: skip
    """Fill `best_S`, which is 0, with the lengths of the survival whose time to the end is least, if it is little enough."""
    count = limits_S.shape[0]
    lengths_S, gains_S = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.float64)
    least = _seconds(count, rows_P, seconds_P) / OFF_UNDER
    for survival in SURVIVALS_T:
        longest = _take(limits_S, rates_S, is_modelled_S, survival, lengths_S, gains_S)
        more = look_seconds + pass_seconds * longest
        seconds = _seconds_a_text(gains_S, lengths_S, rows_P, seconds_P, more)
        if seconds < least and lengths_S.max() > 0:
            least = seconds
            best_S[:] = lengths_S


@ordered()
def _take(limits_S: Any, rates_S: Any, is_modelled_S: Any, least: float, lengths_S: Any, gains_S: Any) -> int:
    """Ids down to a survival, and what they gain; the longest draft that the model makes for it."""
    longest, total = 0, 0.0
    for s in range(limits_S.shape[0]):
        lengths_S[s], gains_S[s], survival = 0, 0.0, rates_S[s]
        while lengths_S[s] < limits_S[s] and survival >= least:
            lengths_S[s] += 1
            gains_S[s] += survival
            survival *= rates_S[s]
        total += gains_S[s]
        if is_modelled_S[s]:
            longest = max(longest, lengths_S[s])
    for s in range(limits_S.shape[0]):
        gains_S[s] = 1 + (gains_S[s] + total / limits_S.shape[0]) / 2
    return longest


@ordered()
def _seconds_a_text(gains_S: Any, lengths_S: Any, rows_P: Any, seconds_P: Any, more: float) -> float:
    """The time until all requests are done, over the steps that plain decoding takes for it."""
    rows, total, before = lengths_S.sum() + lengths_S.shape[0], 0.0, 0.0
    for s in np.argsort(-gains_S):
        end = 1 / gains_S[s]
        total += (end - before) * (_seconds(rows, rows_P, seconds_P) + more)
        rows, before = rows - 1 - lengths_S[s], end
    return total


@ordered()
def _seconds(rows: float, rows_P: Any, seconds_P: Any) -> Any:
    known = rows_P.shape[0]
    if known == 0:
        return 1.0
    if rows >= rows_P[known - 1]:
        slope = (seconds_P[known - 1] - seconds_P[0]) / max(rows_P[known - 1] - rows_P[0], 1.0)
        return seconds_P[known - 1] + slope * (rows - rows_P[known - 1])
    if rows <= rows_P[0]:
        return seconds_P[0]
    place = np.searchsorted(rows_P, rows)
    share = (rows - rows_P[place - 1]) / (rows_P[place] - rows_P[place - 1])
    return seconds_P[place - 1] + share * (seconds_P[place] - seconds_P[place - 1])


class Gate:
    """Decides for an engine, step by step. Told of every look for drafts, and of every step that only decodes."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.passes = StepTimes()
        """Of a draft model, for one id of each of so many sequences."""
        self.rates: dict[str, Rate] = defaultdict(Rate)
        """By kind of draft."""
        self._look_seconds = 0.0
        self._asleep = self._steps = self._unverified = 0

    def wakes(self) -> bool:
        """Whether to look for drafts for the next step. Call once a step."""
        self._asleep -= 1
        return self._asleep < 0 and (self._steps + 1) % PLAIN_EVERY != 0

    def choose(self, limits: Sequence[int], rates: Sequence[float], modelled: Sequence[int] = ()) -> list[int]:
        """`choose_lengths` of these drafts, or a probe."""
        pass_seconds = self.passes.of(len(modelled)) if modelled else 0.0
        lengths = choose_lengths(limits, rates, self.times, self._look_seconds, modelled, pass_seconds)
        if not any(lengths) and self._unverified >= PROBE_EVERY:
            lengths = [min(limit, PROBE_LENGTH) for limit in limits]
        if any(lengths):
            self._unverified = 0
        return lengths

    def note_look(self, lengths: Sequence[int], seconds: float) -> None:
        """A look for drafts of so many requests took so long, and came to `lengths`; falls asleep if it was in vain."""
        self._look_seconds += SMOOTH_LONGER * (seconds - self._look_seconds)
        if not any(lengths):
            step_seconds = self.times.of(len(lengths))
            self._asleep = min(int(self._look_seconds / (VAIN_SHARE * step_seconds)), LONGEST_SLEEP)

    def note_step(self, rows: int, seconds: float) -> None:
        """A step that only decoded took so long."""
        self.times.note(rows, seconds)
        self._steps += 1
        self._unverified += 1
