"""How many groups may be under way: bounded staleness, over-sampling, no deadlock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.rollout.pace import Pace


def fill(pace: Pace) -> int:
    """Start all that may start; how many are under way then."""
    while pace.may_start:
        pace.start()
    return pace.under_way


@pytest.mark.parametrize(
    ("max_staleness", "extra", "under_way"), [(0, 0, 8), (1, 0, 16), (3, 0, 32), (0, 4, 12), (1, 2, 18)]
)
def test_so_many_start_at_first(max_staleness: int, extra: int, under_way: int) -> None:
    assert fill(Pace(8, max_staleness, extra)) == under_way


def test_without_staleness_the_next_batch_waits_for_the_update() -> None:
    pace = Pace(2, 0)
    assert fill(pace) == 2
    for _ in range(2):
        pace.take()
    assert fill(pace) == 0
    pace.begin_batch()
    assert fill(pace) == 2


def test_a_dropped_group_is_replaced_at_once() -> None:
    pace = Pace(2, 0)
    fill(pace)
    pace.drop()
    assert pace.may_start
    pace.start()
    assert not pace.may_start


def test_an_update_in_the_middle_of_a_batch_changes_nothing() -> None:
    pace = Pace(4, 0)
    fill(pace)
    pace.take()
    pace.begin_batch()
    assert (pace.taken, pace.may_start) == (1, False)


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.sampled_from(["take", "drop"]), max_size=60))
def test_a_trainer_that_updates_after_each_batch_gets_nothing_older_than_it_allows(
    batch: int, max_staleness: int, ends: list[str]
) -> None:
    """Groups are taken in the order in which they started; each is at most so many versions old."""
    pace, version, started = Pace(batch, max_staleness), 0, list[int]()
    for end in ends:
        while pace.may_start:
            pace.start()
            started.append(version)
        assert started, "nothing is under way, and nothing may start"
        age = version - started.pop(0)
        if end == "drop":
            pace.drop()
            continue
        assert age <= max_staleness
        pace.take()
        if pace.taken == batch:
            version += 1
            pace.begin_batch()


@pytest.mark.parametrize(("batch", "max_staleness", "extra"), [(0, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_nonsense_is_refused(batch: int, max_staleness: int, extra: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        Pace(batch, max_staleness, extra)
