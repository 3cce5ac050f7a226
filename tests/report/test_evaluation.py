"""Means over tasks, their intervals, and pass@k."""

from itertools import combinations

import pytest
from rich.console import Console

from agentrt.core.records import EpisodeRecord, Score, StopReason
from agentrt.report.evaluation import estimate, evaluate, pass_at_k, render, student_t


def record(task: str, member: int, score: float | None, *, attempt: int = 0, status: str = "ok") -> EpisodeRecord:
    return EpisodeRecord(
        task_id=task, member=member, attempt=attempt, seed=0, status=status, stop_reason=StopReason.COMPLETED,  # type: ignore[arg-type]
        truncated=False, reward=None if score is None else 2 * score, rewards={"right": Score(score, 2.0)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (30, 2.04227), (1000, 1.96234)],
)
def test_student_t_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, rel=8e-3)


@pytest.mark.parametrize(("count", "right"), [(4, 0), (4, 1), (4, 3), (4, 4), (5, 2)])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_counts_draws(count: int, right: int, k: int) -> None:
    draws = list(combinations([1] * right + [0] * (count - right), k))
    assert pass_at_k(count, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_an_interval_needs_tasks_that_differ() -> None:
    found = estimate([0.0, 1.0, 1.0, 0.0])
    assert (found.mean, found.tasks) == (0.5, 4)
    assert found.low == pytest.approx(-0.419, abs=8e-3)
    assert found.high == pytest.approx(1.419, abs=8e-3)
    assert str(estimate([1.0, 1.0])) == "1.000  (no interval: all tasks agree)"
    assert str(estimate([0.25])) == "0.250  (one task)"


def test_tasks_are_the_sample() -> None:
    """Two tasks of two episodes: a retried one counts once, a failed one and an unscored one not at all."""
    records = [
        record("a", 0, 1.0), record("a", 1, 0.0), record("b", 0, 0.0, status="error"), record("b", 0, 1.0, attempt=1),
        record("b", 1, None), record("c", 0, 0.5, status="error"),
    ]  # fmt: skip
    found = evaluate(records, success=2.0)
    assert (found.tasks, found.episodes, found.scored) == (2, 4, 3)
    assert found.reward is not None
    assert found.reward.mean == pytest.approx((1.0 + 2.0) / 2)
    assert found.rewards["right"].mean == pytest.approx((0.5 + 1.0) / 2)
    assert {k: (part.mean, part.tasks) for k, part in found.pass_at.items()} == {1: (0.75, 2), 2: (1.0, 1)}
    console = Console(record=True, width=100)
    console.print(render(found))
    text = console.export_text()
    assert "pass@2" in text
    assert "2, 3 of 4 episodes scored" in text


def test_nothing_scored() -> None:
    found = evaluate([record("a", 0, None)], success=1.0)
    assert (found.reward, found.rewards, found.pass_at) == (None, {}, {})
    console = Console(record=True, width=100)
    console.print(render(found))
    assert "no episode was scored" in console.export_text()
