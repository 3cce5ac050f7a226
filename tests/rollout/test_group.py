"""What a group's rewards say of its members."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.env.rubric import LARGEST
from agentrt.rollout.group import group_record


def test_c22_null_members_count_for_nothing() -> None:
    group = group_record("t", [1.0, 0.0, None, None])
    assert (group.members, group.valid) == (4, 2)
    assert group.rewards == [1.0, 0.0, None, None]
    assert group.advantages == [1.0, -1.0, None, None]


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([0.7], [0.0]),
        ([None, 0.7, None], [None, 0.0, None]),
        ([0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
        ([0.0, 5e-324], [0.0, 0.0]),
        ([None, None], [None, None]),
        ([], []),
    ],
)
def test_c22_no_spread_is_no_advantage_and_no_nan(rewards: list[float | None], advantages: list[float | None]) -> None:
    assert group_record("t", rewards).advantages == advantages


def test_the_largest_rewards_have_advantages() -> None:
    assert group_record("t", [LARGEST, LARGEST, -LARGEST]).advantages == pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5)])


def test_c22_a_group_without_valid_members_has_failed() -> None:
    assert group_record("t", [None, None]).valid == 0


@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=8))
def test_advantages_are_finite_and_sum_to_zero(rewards: list[float | None]) -> None:
    given = [advantage for advantage in group_record("t", rewards).advantages if advantage is not None]
    assert len(given) == sum(reward is not None for reward in rewards)
    assert sum(given) == pytest.approx(0.0, abs=1e-6 * max(1, len(given)))
