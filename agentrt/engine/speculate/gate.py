"""The gate: whether drafts are looked for, and how much of them a step verifies. Pure; it is told what was measured.

*How many ids.* A request that gets an id more needs a step less. In plain steps that saves the time of its row, and its
share of what all rows need together (the weights are read once) as far as all requests gain alike: a batch is done when its
last request is. An id that is drafted costs what drafted rows were seen to add to a step (`times.py`). So ids are taken
while they stand often enough (`survival.py`) to bring what they cost, at the pace of the last steps, and none at all
unless a step's drafts save 3 %.

*Whether at all.* There is a purse: half a per cent of the time, and what drafts saved, counted when they stood and not when
they promised to. From it is paid what a step took longer than a plain one, if anything was done for drafts in it: looks for
them, a model's passes, their rows, and all that these disturb. When it is empty nobody looks until there is enough for
several looks in a row (chances come in clusters), and meanwhile a step costs what it costs without speculation. So whatever
drafts promise, no more is meant to be lost than that half per cent, and what the purse holds when they cease to pay: the
time of ten steps at most (what was lost is in docs/benchmarks.md). Plain steps are timed when nobody
looked, for a look leaves the caches colder.

What the gate knows does not grow old: one step in 32 is plain though drafts would pay, and two ids of each draft are verified
though they would not, ever more rarely, down to once in 512 steps. The purse pays for that too.

Whether an id is likely comes from past acceptances of its kind only, a kind being what the proposer saw *before* it chose.
The chance of the very id that was drawn must not play a part: a draft cut short because its id is unlikely biases the text
(under `rejection`; `coupled` cannot be biased).
"""

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from agentrt.engine.speculate.survival import Survival
from agentrt.engine.speculate.times import OUTLIER, SMOOTH, Curve, StepTimes

OFF_UNDER = 1.03
"""The time of plain decoding over that with drafts."""
REGRET = 0.005
"""Of the time, that speculation may have cost."""
TRUST = 0.75
"""Of what an id is worked out to save. A gate that trusted all of it booked up to a third more than plain decoding beside it
proved: plain steps seem long where a look has just left the caches cold, or the machine was slower a moment ago.
"""
PUT_BY = 10.0
"""Plain steps, at most, that the purse keeps of what was saved: from then on a gate that was right may be wrong."""
IN_A_ROW = 32.0
"""Looks for which there must be enough before the next one, once the purse was empty; the time of a plain step at most."""
PLAIN_EVERY = 32
"""Steps after which one is plain."""
FIRST_PROBE, PROBE_EVERY = 2, 512
"""Steps after which drafts are verified that do not seem to pay; twice as many after each time, up to `PROBE_EVERY`."""
PROBE_LENGTH = 2
TIMED_EVERY = 8
"""Plain steps of which one is timed while the gate sleeps: even that little is felt in a step of half a millisecond."""
PACE_KEPT = 0.98
"""Of the pace, at each look."""
RENEWED = 8
"""Looks of as many requests after which what an id saves is worked out anew."""
LIKE_OTHERS = 8.0
"""Ids that it counts as that a request is like the others."""
NOTHING = 1e-12
"""Seconds."""


class Terms(NamedTuple):
    """On which drafts are looked for."""

    row: float
    """Seconds that a drafted row takes."""
    gain: float
    """Seconds that one more id saves, at the present pace."""
    longest: int
    """Ids of a draft, at most."""

    def least(self, passes: float = 0.0) -> float:
        """How often an id must stand to be worth its row, and a draft model's `passes` seconds for it."""
        return (self.row + passes) / max(self.gain, NOTHING)


def evenness(taken: Sequence[int], sampled: Sequence[int]) -> float:
    """How much all of some requests gain alike, from 0 (one gains nothing) to 1: the least gain over the mean one.

    `taken` are ids that each has from drafts, of those that it `sampled`.
    """
    mean = sum(taken) / max(sum(sampled), 1)
    gains = [(one + LIKE_OTHERS * mean) / (all_ids + LIKE_OTHERS) for one, all_ids in zip(taken, sampled, strict=True)]
    return min(gains) * len(gains) / sum(gains) if mean else 1.0


def saved_by_an_id(requests: int, times: StepTimes, even: float) -> float:
    """Seconds that one of so many requests, which decode without drafts, needs less if it has an id more.

    Its own row takes what steps take longer for each request, and no less than a drafted row. The rest is everybody's, and is
    saved as far as everybody gains.
    """
    step = times.plain.about(requests)
    slope = (step - times.plain.of(1)) / (requests - 1) if requests > 1 else 0.0
    share = step / requests
    own = min(max(slope, times.row()), share)
    return own + even * (share - own)


class Gate:
    """Decides for an engine, step by step. Told of every look for drafts, and of every step in which something decodes."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.passes = Curve()
        """Of a draft model, for one id of each of so many sequences."""
        self.kinds: dict[str, Survival] = defaultdict(Survival)
        """Drafts that are accepted alike."""
        self.purse = -inf
        """Seconds that drafts may cost still. Nothing may be spent before a plain step was seen."""
        self._enough = 0.0
        """In the purse for the next look: nothing, or, once it was empty, something for several looks."""
        self._look = inf
        """Seconds of a look, about."""
        self._pace = 1.0
        """How much faster than plain steps the last ones were."""
        self.even = 1.0
        """`evenness` of the requests that decode."""
        self._looks = self._requests = 0
        self._steps = self._verified = self._probe_after = 0
        self._is_probe = False
        self._plain, self._gain, self._row = NOTHING, 0.0, 0.0
        """Of a step of as many requests as in the last look: what it takes without drafts, what an id saves, and what a drafted
        row takes."""
        self._own_seconds, self._stolen = 0.0, 0.0
        """What was done for drafts in this step, beside it, and what of that was something else's doing, by its length."""

    def wakes(self) -> bool:
        """Whether to look for drafts for the next step. Call once a step."""
        return self.purse >= self._enough and (self._steps + 1) % PLAIN_EVERY != 0

    def terms(self, requests: int, longest: int) -> Terms:
        """For a look in which so many requests decode; without regard to what pays if it is time for a probe."""
        self._looks += 1
        if requests != self._requests or self._looks % RENEWED == 0:
            self._requests, self._plain = requests, self.times.plain.about(requests)
            self._gain, self._row = TRUST * saved_by_an_id(requests, self.times, self.even), self.times.row()
        self._is_probe = not self.times.drafted.is_known or self._steps - self._verified >= self._probe_after
        if self._is_probe:
            return Terms(0.0, 1.0, min(longest, PROBE_LENGTH))
        return Terms(self._row, self._gain / self._pace, longest)

    def saves(self, ids: float, rows: int, passes: float = 0.0) -> float:
        """Seconds of a step in whose drafts so many ids will stand; a draft model takes `passes` seconds for them."""
        return self._gain * ids - self.times.added(rows) - passes

    def pays(self, ids: float, rows: int, passes: float = 0.0) -> bool:
        """Whether to verify these drafts."""
        cost = self.times.added(rows) + passes
        saved = self._gain * ids - cost
        return rows > 0 and (self._is_probe or saved >= (OFF_UNDER - 1) * (self._plain + cost))

    def note_look(self, seconds: float) -> None:
        """A look for drafts took so long."""
        usual = min(seconds, (1 + SMOOTH) * self._look)
        self._own_seconds += seconds
        self._stolen += seconds - (min(seconds, OUTLIER * usual) if self._look < inf else 0.0)  # the first one compiles
        self._look = usual

    def note_passes(self, count: int, length: int, seconds: float) -> None:
        """A draft model's drafts of so many sequences, of `length` ids each, took so long."""
        self.passes.note(count, seconds / length)
        self._own_seconds += seconds

    def note_step(self, requests: int, drafted: int, accepted: int, seconds: float, prompt_rows: int = 0) -> None:
        """A step took so long, with so many rows of drafts and of prompts beside those of the requests that decoded.

        Of the drafts `accepted` ids stood.
        """
        self._steps += 1
        is_first, own = self.purse == -inf, self._own_seconds
        self.purse += REGRET * seconds
        if drafted or own:
            self._account(drafted, accepted, self._cost(drafted, seconds, prompt_rows))
        if drafted or is_first or not (own or self._steps % TIMED_EVERY):
            self.times.note(requests, drafted, seconds - own, prompt_rows)
        if is_first and self.times.plain.is_known:
            self.purse = PUT_BY * seconds
        self._own_seconds = self._stolen = 0.0

    def _cost(self, drafted: int, seconds: float, prompt_rows: int) -> float:
        """Of what was done for drafts in a step: what it took beyond a plain one. Beside a prompt, whose rows take what they
        take, it is what drafted rows add mostly.
        """
        known = self._own_seconds + self.times.added(drafted)
        if prompt_rows:
            return known - self._stolen
        return min(seconds - self._stolen, OUTLIER * (self._plain + known)) - self._plain

    def _account(self, drafted: int, accepted: int, cost: float) -> None:
        """Pay what drafts cost in a step, and take what they saved."""
        gain = self._gain * accepted
        self._pace = PACE_KEPT * self._pace + (1 - PACE_KEPT) * (self._plain + gain) / max(self._plain + cost, NOTHING)
        room = max(PUT_BY * self._plain - self.purse, 0.0)
        self.purse = max(self.purse + min(gain - cost, room), -self._plain)
        self._enough = 0.0 if self.purse >= 0 else min(IN_A_ROW * self._look, self._plain)
        if drafted:
            self._verified = self._steps
            if self._is_probe and self.times.drafted.is_known:
                self._probe_after = min(2 * max(self._probe_after, FIRST_PROBE), PROBE_EVERY)


class OpenGate(Gate):
    """Has all drafts looked for, and verified whole, whatever they cost: for tests and figures."""

    def wakes(self) -> bool:
        return True

    def terms(self, requests: int, longest: int) -> Terms:
        return Terms(0.0, inf, longest)

    def saves(self, ids: float, rows: int, passes: float = 0.0) -> float:
        return ids

    def pays(self, ids: float, rows: int, passes: float = 0.0) -> bool:
        return rows > 0
