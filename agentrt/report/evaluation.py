"""What an evaluation found: means and pass@k with 95 % intervals, over tasks.

Episodes of one task resemble each other, so tasks are the sample: a task's value is the mean over its scored episodes,
an estimate the mean over tasks, and its interval mean ± t · s / √n with Student's t for n - 1. Where all tasks agree, or
there is only one, the spread is unknown and there is no interval.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist, fmean, stdev

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table

from agentrt.core.records import EpisodeRecord, good_records

CONFIDENCE = 0.95


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over tasks and its interval."""

    mean: float
    low: float | None
    high: float | None
    tasks: int

    def __str__(self) -> str:
        interval = "no interval: all tasks agree" if self.tasks > 1 else "one task"
        if self.low is not None and self.high is not None:
            interval = f"{self.low:.3f} to {self.high:.3f}"
        return f"{self.mean:.3f}  ({interval})"


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Over the good record of each episode."""

    tasks: int
    episodes: int
    scored: int
    success: float
    """The reward from which on an episode has passed."""
    reward: Estimate | None
    rewards: dict[str, Estimate]
    """Each component, unweighted."""
    pass_at: dict[int, Estimate]
    """The chance that one of k episodes of a task passes."""


def evaluate(records: Iterable[EpisodeRecord], success: float) -> Evaluation:
    """The evaluation of all attempts on disk."""
    good = list(good_records(records).values())
    rewards = _by_task((record.task_id, record.reward) for record in good)
    names = dict.fromkeys(name for record in good for name in record.rewards)
    parts = {
        name: _by_task((record.task_id, record.rewards[name].score) for record in good if name in record.rewards)
        for name in names
    }
    passed = [(len(values), sum(value >= success for value in values)) for values in rewards.values()]
    most = max((count for count, _ in passed), default=0)
    return Evaluation(
        tasks=len({record.task_id for record in good}),
        episodes=len(good),
        scored=sum(len(values) for values in rewards.values()),
        success=success,
        reward=_of_tasks(rewards),
        rewards={name: found for name, values in parts.items() if (found := _of_tasks(values)) is not None},
        pass_at={k: estimate([pass_at_k(count, right, k) for count, right in passed if count >= k]) for k in _ks(most)},
    )


def pass_at_k(count: int, right: int, k: int) -> float:
    """The chance that k of `count` episodes, drawn without putting back, hold one of the `right` ones."""
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one or more values, and its interval."""
    count, mean = len(values), fmean(values)
    if count < 2 or min(values) == max(values):
        return Estimate(mean=mean, low=None, high=None, tasks=count)
    reach = student_t(count - 1) * stdev(values) / math.sqrt(count)
    return Estimate(mean=mean, low=mean - reach, high=mean + reach, tasks=count)


def student_t(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t: exact for 1 and 2, within 1 % from 3 on (Hill's expansion)."""
    tail = (1 + CONFIDENCE) / 2
    if freedom == 1:
        return math.tan(math.pi * (tail - 0.5))
    if freedom == 2:
        return (2 * tail - 1) * math.sqrt(2 / (4 * tail * (1 - tail)))
    z, v = NormalDist().inv_cdf(tail), float(freedom)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def render(evaluation: Evaluation) -> RenderableType:
    """The evaluation as a person reads it."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("tasks", f"{evaluation.tasks}, {evaluation.scored} of {evaluation.episodes} episodes scored")
    table.add_row("reward", "none: no episode was scored" if evaluation.reward is None else str(evaluation.reward))
    for name, part in evaluation.rewards.items():
        table.add_row(f"  {name}", str(part))
    for k, part in evaluation.pass_at.items():
        table.add_row(f"pass@{k}", str(part))
    table.add_row(
        "", f"[dim]intervals: {CONFIDENCE:.0%}, over tasks; passed: reward of {evaluation.success:g} or more[/dim]"
    )
    return Group("", table)


def _by_task(scores: Iterable[tuple[str, float | None]]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for task_id, score in scores:
        if score is not None:
            values.setdefault(task_id, []).append(score)
    return values


def _of_tasks(values: Mapping[str, Sequence[float]]) -> Estimate | None:
    return estimate([fmean(scores) for scores in values.values()]) if values else None


def _ks(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | ({most} if most else set()))
