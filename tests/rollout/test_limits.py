"""`Budget`: which limit ends an episode, in which order, and how long a turn may be."""

import pytest

from agentrt import Limits, StopReason
from agentrt.rollout.limits import Budget

FREE = Limits(max_turns=None, max_turn_tokens=100, max_idle_turns=None, wall_seconds=None)


def budget(context_length: int = 1000, **limits: int | None) -> Budget:
    values = {name: getattr(FREE, name) for name in FREE.__struct_fields__} | limits
    return Budget(Limits(**values), context_length)


def taken(budget: Budget, context: int, sampled: int | None = None) -> int | StopReason:
    """One turn: what it was granted, after it sampled that much or `sampled`."""
    granted = budget.grant(context)
    if not isinstance(granted, StopReason):
        budget.settle(granted, granted if sampled is None else sampled)
    return granted


def test_a_turn_may_have_max_turn_tokens() -> None:
    assert taken(budget(), 10) == 100


@pytest.mark.parametrize(("context", "granted"), [(900, 100), (901, 99), (999, 1)])
def test_the_context_bounds_a_turn(context: int, granted: int) -> None:
    assert taken(budget(), context) == granted


@pytest.mark.parametrize("context", [1000, 1001, 5000])
def test_a_full_context_ends_the_episode(context: int) -> None:
    assert taken(budget(), context) is StopReason.CONTEXT_LENGTH


def test_episode_tokens_bound_the_last_turn_and_end_it() -> None:
    spent = budget(max_episode_tokens=150)
    assert [taken(spent, 0), taken(spent, 100), taken(spent, 150)] == [100, 50, StopReason.EPISODE_TOKENS]


def test_episode_tokens_are_reserved_while_branches_sample() -> None:
    shared = budget(max_episode_tokens=150)
    assert [shared.grant(0), shared.grant(0), shared.grant(0)] == [100, 50, StopReason.EPISODE_TOKENS]
    shared.settle(100, 10)
    assert shared.grant(0) == 90


def test_max_turns() -> None:
    few = budget(max_turns=2)
    assert [taken(few, 0), taken(few, 0), taken(few, 0)] == [100, 100, StopReason.MAX_TURNS]


def test_the_order_of_the_limits() -> None:
    spent = budget(max_turns=1, max_idle_turns=1, max_episode_tokens=5)
    taken(spent, 0)
    spent.judge(has_progress=False)
    assert taken(spent, 9999) is StopReason.MAX_TURNS
    spent = budget(max_idle_turns=1, max_episode_tokens=5)
    taken(spent, 0)
    spent.judge(has_progress=False)
    assert taken(spent, 9999) is StopReason.NO_PROGRESS
    spent = budget(max_episode_tokens=5)
    taken(spent, 0)
    assert taken(spent, 9999) is StopReason.EPISODE_TOKENS


def test_idle_turns_count_in_a_row() -> None:
    idle = budget(max_idle_turns=2)
    for has_progress in (False, True, False):
        assert taken(idle, 0) == 100
        idle.judge(has_progress=has_progress)
    assert taken(idle, 0) == 100
    idle.judge(has_progress=False)
    assert taken(idle, 0) is StopReason.NO_PROGRESS


def test_a_turn_without_calls_breaks_the_row() -> None:
    idle = budget(max_idle_turns=1)
    taken(idle, 0)
    taken(idle, 0)
    assert taken(idle, 0) == 100


@pytest.mark.parametrize(
    ("limits", "context", "reason"),
    [
        ({}, 0, StopReason.TURN_LENGTH),
        ({"max_episode_tokens": 40}, 0, StopReason.EPISODE_TOKENS),
        ({}, 990, StopReason.CONTEXT_LENGTH),
    ],
)
def test_which_limit_cut_a_turn(limits: dict[str, int], context: int, reason: StopReason) -> None:
    cut = budget(**limits)
    granted = taken(cut, context)
    assert isinstance(granted, int)
    assert cut.cut_by(granted) is reason


def test_tool_calls_are_counted_and_a_turn_that_passes_the_limit_runs_none() -> None:
    calls = budget(max_tool_calls=3)
    assert [calls.admit(2), calls.admit(2), calls.admit(1)] == [None, StopReason.TOOL_CALLS, None]
