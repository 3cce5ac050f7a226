"""The gate: how much of each draft a step verifies, if any. Pure; it is told what steps took and what was accepted.

A request whose drafts are verified gains 1 + sum over depths j of S_j ids a step (S_j: how often j ids of such a draft stood
until now, `survival.py`), and is done in so many fewer steps. The gate weighs the time until all running requests are
done, if each has equally much to say: a step takes what plain steps of so many requests were seen to take, and what so many
drafted rows were seen to take beside it (`times.py`), and becomes cheaper as requests end. So
fast ones do not pay for the whole batch when slow ones hold it up. Who has a draft changes from step to step, though: so
what is gained is dealt out as drafts were until now (`survival.Standing`). It takes the drafts with which that time is
shortest, each request its own number of ids, and none unless they save 3 % against plain decoding, the look for them
included. Looks in vain may cost half a per cent of the time, and a quarter of what drafts save. What it knows does not grow
old: one step in 64 is plain though drafts would pay, and one in 512 verifies some though they would not.

Whether an id is likely comes from past acceptances of its class only, a class being what the proposer saw *before* it chose.
The chance of the very id that was drawn must not play a part: a draft cut short because its id is unlikely biases the text
(under `rejection`; `coupled` cannot be biased).

Suffixes: S requests, J depths of a draft, T thresholds, P measured counts.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrt.engine.speculate.survival import Survival
from agentrt.engine.speculate.times import Curve, StepTimes, seconds_of
from agentrt_kernels.compiled import ordered

Floats = NDArray[np.float64]

OFF_UNDER = 1.03
"""The time of plain decoding over that with drafts."""
THRESHOLDS_T = np.array([0.9, 0.75, 0.6, 0.45, 0.35, 0.25, 0.15, 0.07])
"""Down to which survival drafts may be taken."""
VAIN_SHARE, VAIN_GAIN = 0.005, 0.25
"""Of the time, and of the seconds that drafts save, for looks in vain."""
MOST_LOOKS = 4.0
"""In vain, that the gate saves for: chances come in clusters."""
LONGEST_SLEEP = 128
"""Steps, after a look that took long because something was compiled in it, say."""
PLAIN_EVERY = 64
"""Steps after which one is plain."""
FIRST_PROBE, PROBE_EVERY = 2, 512
"""Steps after which drafts are verified that do not seem to pay; twice as many after each time, up to `PROBE_EVERY`."""
PROBE_LENGTH = 2
TIMED_EVERY = 8
"""Plain steps of which one is timed while the gate sleeps: even that little is felt in a step of half a millisecond."""
NOBODY_S = np.empty(0, dtype=np.bool_)
"""No request is drafted for by a model."""


class Choice(NamedTuple):
    """What to verify, and what comes of it."""

    lengths: list[int]
    """Of each request's draft."""
    saved: float
    """Seconds, for each step that plain decoding would take."""


def choose_lengths(
    limits: Sequence[int], survivals_SJ: Floats, times: StepTimes, look_seconds: float = 0.0,
    modelled: Sequence[int] = (), pass_seconds: float = 0.0, standings: Sequence[float] = (),
) -> Choice:  # fmt: skip
    """How many ids of each draft to verify in a step of so many requests; all 0 if that saves less than 3 %.

    `limits` are the drafts' lengths, 0 for a request without one; `survivals_SJ` how often the first j + 1 ids of each stand.
    Ids are taken down to one survival for all requests, so rows are spent where they bring most. To look for drafts takes
    `look_seconds` a step, which plain decoding does not, and a model takes `pass_seconds` for each id of the longest draft
    that it makes for the requests `modelled`. `standings` are what drafts of each were worth until now beside the others',
    by default all the same.
    """
    if not any(limits) or not times.is_known:
        return Choice([0] * len(limits), 0.0)
    is_modelled_S = NOBODY_S
    if modelled:
        is_modelled_S = np.zeros(len(limits), dtype=np.bool_)
        is_modelled_S[list(modelled)] = True
    limits_S, lengths_S = np.array(limits, dtype=np.int64), np.zeros(len(limits), dtype=np.int64)
    standings_S = np.array(standings) if standings else np.ones(len(limits))
    saved = _choose(
        limits_S, survivals_SJ, standings_S, is_modelled_S, *times.plain.curve(), *times.drafted.parts(), look_seconds,
        pass_seconds, lengths_S,
    )  # fmt: skip
    return Choice(lengths_S.tolist(), saved)


@ordered()
def _choose(
    limits_S: Any, survivals_SJ: Any, standings_S: Any, is_modelled_S: Any, plain_P: Any, plain_seconds_P: Any,
    always: float, each: float, look_seconds: float, pass_seconds: float, best_S: Any,
) -> float:  # fmt: skip
    """Fill `best_S`, which is 0, with the lengths of the threshold whose time to the end is least, if it is little enough.

    Returns what is saved.
    """
    count, saved = limits_S.shape[0], 0.0
    lengths_S, gains_S = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.float64)
    plain = seconds_of(count, plain_P, plain_seconds_P)
    least = plain / OFF_UNDER
    for threshold in THRESHOLDS_T:
        longest = _take(limits_S, survivals_SJ, standings_S, is_modelled_S, threshold, lengths_S, gains_S)
        more = look_seconds + pass_seconds * longest
        seconds = _seconds_a_text(gains_S, lengths_S, plain_P, plain_seconds_P, always, each, more)
        if seconds < least and lengths_S.max() > 0:
            least, saved = seconds, plain - seconds
            best_S[:] = lengths_S
    return saved


@ordered()
def _take(
    limits_S: Any, survivals_SJ: Any, standings_S: Any, is_modelled_S: Any, least: float, lengths_S: Any, gains_S: Any
) -> int:  # fmt: skip
    """Ids down to a survival, and what they gain; the longest draft that the model makes for it."""
    longest, total = 0, 0.0
    for s in range(limits_S.shape[0]):
        lengths_S[s], gains_S[s] = 0, 0.0
        while lengths_S[s] < limits_S[s] and survivals_SJ[s, lengths_S[s]] >= least:
            gains_S[s] += survivals_SJ[s, lengths_S[s]]
            lengths_S[s] += 1
        total += gains_S[s]
        if is_modelled_S.shape[0] and is_modelled_S[s]:
            longest = max(longest, lengths_S[s])
    for s in range(limits_S.shape[0]):
        gains_S[s] = 1 + total * standings_S[s] / standings_S.sum()
    return longest


@ordered()
def _seconds_a_text(
    gains_S: Any, lengths_S: Any, plain_P: Any, plain_seconds_P: Any, always: float, each: float, more: float
) -> float:  # fmt: skip
    """The time until all requests are done, over the steps that plain decoding takes for it."""
    requests, drafted, total, before = lengths_S.shape[0], lengths_S.sum(), 0.0, 0.0
    for s in np.argsort(-gains_S):
        end = 1 / gains_S[s]
        step = seconds_of(requests, plain_P, plain_seconds_P) + more
        if drafted:
            step += always + each * drafted
        total += (end - before) * step
        requests, drafted, before = requests - 1, drafted - lengths_S[s], end
    return total


class Gate:
    """Decides for an engine, step by step. Told of every look for drafts, and of every step in which something decodes."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.passes = Curve()
        """Of a draft model, for one id of each of so many sequences."""
        self.kinds: dict[str, Survival] = defaultdict(Survival)
        """Drafts that are accepted alike."""
        self.looks = Curve()
        """For drafts, of so many requests."""
        self._own_seconds = 0.0
        """Of what was done for drafts in this step, beside it."""
        self._steps = self._unverified = self._probe_after = 0
        self._purse = 0.0
        """Seconds that looks in vain may take, less those that they took."""
        self._saved = 0.0
        """By the drafts of this step."""

    def begin(self) -> None:
        """A step begins."""
        self._own_seconds = self._saved = 0.0

    def wakes(self) -> bool:
        """Whether to look for drafts for the next step. Call once a step."""
        return self._purse >= 0 and (self._steps + 1) % PLAIN_EVERY != 0

    def choose(
        self, limits: Sequence[int], survivals_SJ: Floats, modelled: Sequence[int] = (), standings: Sequence[float] = ()
    ) -> list[int]:  # fmt: skip
        """`choose_lengths` of these drafts, or a probe."""
        pass_seconds = self.passes.of(len(modelled)) if modelled else 0.0
        look_seconds = self.looks.measured(len(limits)) if self.looks.is_known else 0.0
        lengths, self._saved = choose_lengths(
            limits, survivals_SJ, self.times, look_seconds, modelled, pass_seconds, standings
        )
        if any(lengths):
            self._unverified = 0
        elif any(limits) and self.times.plain.is_known and self._unverified >= self._probe_after:
            lengths = [min(limit, PROBE_LENGTH) for limit in limits]
            self._unverified = 0
            if self.times.drafted.is_known:
                self._probe_after = min(2 * max(self._probe_after, FIRST_PROBE), PROBE_EVERY)
        return lengths

    def note_look(self, lengths: Sequence[int], seconds: float) -> None:
        """A look for drafts of so many requests took so long, and came to `lengths`."""
        self.looks.note(len(lengths), seconds)
        self._own_seconds += seconds
        if self._saved:
            most = MOST_LOOKS * self.looks.measured(len(lengths))
            self._purse = min(self._purse + VAIN_GAIN * self._saved, most)
        elif self.times.plain.is_known:
            least = -LONGEST_SLEEP * VAIN_SHARE * self.times.plain.about(len(lengths))
            self._purse = max(self._purse - seconds, least)

    def note_passes(self, count: int, length: int, seconds: float) -> None:
        """A draft model's drafts of so many sequences, of `length` ids each, took so long."""
        self.passes.note(count, seconds / length)
        self._own_seconds += seconds

    def note_step(self, requests: int, drafted: int, seconds: float, prompt_rows: int = 0) -> None:
        """A step took so long, with so many rows of drafts and of prompts beside those of the requests that decoded."""
        self._steps += 1
        self._unverified += 1
        if self._purse < 0:
            self._purse += VAIN_SHARE * seconds
        is_timed = drafted or self._own_seconds or not self.times.plain.is_known
        if is_timed or self._steps % TIMED_EVERY == 0:
            self.times.note(requests, drafted, seconds - self._own_seconds, prompt_rows)
