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

import numpy as np
from numpy.typing import NDArray

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
        self._rows_P: NDArray[np.float64] = np.zeros(0)
        self._seconds_P: NDArray[np.float64] = np.zeros(0)

    def note(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took so long."""
        half_octave = round(2 * log2(rows))
        mean_rows, mean_seconds = self._measured.get(half_octave, (rows, seconds))
        share = SMOOTH_LONGER if seconds > mean_seconds else SMOOTH_SHORTER
        self._measured[half_octave] = (
            mean_rows + share * (rows - mean_rows), mean_seconds + share * (seconds - mean_seconds)
        )  # fmt: skip
        self._rows_P, seconds_P = np.array([self._measured[key] for key in sorted(self._measured)]).T
        self._seconds_P = np.minimum.accumulate(seconds_P[::-1])[::-1]

    def of(self, rows_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """For each number of rows. Beyond the largest known count as steep as on average up to it; 1 if none is known."""
        if not self._measured:
            return np.ones(rows_B.shape)
        most, longest = self._rows_P[-1], self._seconds_P[-1]
        slope = (longest - self._seconds_P[0]) / max(most - self._rows_P[0], 1.0)
        seconds_B: NDArray[np.float64] = np.interp(rows_B, self._rows_P, self._seconds_P)
        seconds_B += slope * np.maximum(rows_B - most, 0.0)
        return seconds_B


def choose_lengths(
    limits: Sequence[int], rates: Sequence[float], times: StepTimes, look_seconds: float = 0.0
) -> list[int]:
    """How many ids of each draft to verify in a step of so many requests; all 0 if that saves less than 3 %.

    `limits` are the drafts' lengths, 0 for a request without one; `rates` the chance of an id of each. Ids are taken down to
    one survival a^j for all requests, so rows are spent where they bring most. To look for drafts takes `look_seconds`
    a step, which plain decoding does not.
    """
    if not any(limits):
        return [0] * len(limits)
    depths_K = np.arange(1, max(limits) + 1)
    survival_SK = np.where(depths_K <= np.array(limits)[:, None], np.array(rates)[:, None] ** depths_K, 0.0)
    taken_TSK = survival_SK >= SURVIVALS_T[:, None, None]
    lengths_TS = taken_TSK.sum(axis=2)
    own_TS = (survival_SK * taken_TSK).sum(axis=2)
    gains_TS = 1 + (own_TS + own_TS.mean(axis=1, keepdims=True)) / 2
    seconds_T = _seconds_a_text(gains_TS, 1 + lengths_TS, times, look_seconds)
    best = int(np.argmin(seconds_T))
    if times.of(np.array([len(limits)]))[0] < OFF_UNDER * seconds_T[best]:
        return [0] * len(limits)
    lengths: list[int] = lengths_TS[best].tolist()
    return lengths


def _seconds_a_text(
    gains_TS: NDArray[np.float64], rows_TS: NDArray[np.int64], times: StepTimes, look_seconds: float
) -> NDArray[np.float64]:
    """For each choice T, the time until all requests are done, over the steps that plain decoding takes for it."""
    order_TS = np.argsort(-gains_TS, axis=1, kind="stable")
    ends_TS = 1 / np.take_along_axis(gains_TS, order_TS, axis=1)
    live_rows_TS = np.take_along_axis(rows_TS, order_TS, axis=1)[:, ::-1].cumsum(axis=1)[:, ::-1]
    seconds_T: NDArray[np.float64] = (
        np.diff(ends_TS, axis=1, prepend=0.0) * (times.of(live_rows_TS) + look_seconds)
    ).sum(axis=1)  # fmt: skip
    return seconds_T


class Gate:
    """Decides for an engine, step by step. Told of every look for drafts, and of every step that only decodes."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.rates: dict[str, Rate] = defaultdict(Rate)
        """By kind of draft."""
        self._look_seconds = 0.0
        self._asleep = self._steps = self._unverified = 0

    def wakes(self) -> bool:
        """Whether to look for drafts for the next step. Call once a step."""
        self._asleep -= 1
        return self._asleep < 0 and (self._steps + 1) % PLAIN_EVERY != 0

    def choose(self, limits: Sequence[int], rates: Sequence[float]) -> list[int]:
        """`choose_lengths` of these drafts, or a probe."""
        lengths = choose_lengths(limits, rates, self.times, self._look_seconds)
        if not any(lengths) and self._unverified >= PROBE_EVERY:
            lengths = [min(limit, PROBE_LENGTH) for limit in limits]
        if any(lengths):
            self._unverified = 0
        return lengths

    def note_look(self, lengths: Sequence[int], seconds: float) -> None:
        """A look for drafts of so many requests took so long, and came to `lengths`; falls asleep if it was in vain."""
        self._look_seconds += SMOOTH_LONGER * (seconds - self._look_seconds)
        if not any(lengths):
            step_seconds = float(self.times.of(np.array([len(lengths)]))[0])
            self._asleep = min(int(self._look_seconds / (VAIN_SHARE * step_seconds)), LONGEST_SLEEP)

    def note_step(self, rows: int, seconds: float) -> None:
        """A step that only decoded took so long."""
        self.times.note(rows, seconds)
        self._steps += 1
        self._unverified += 1
