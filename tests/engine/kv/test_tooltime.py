"""What is learned of tools' durations, against values calculated by hand and against Kaplan and Meier's estimate."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.engine.kv.tooltime import (
    EDGES,
    MOST_CLASSES,
    NUM_BINS,
    UNKNOWN,
    WINDOW,
    Curve,
    Durations,
    Foretold,
    Measured,
    ToolTimes,
    bin_of,
)

SECOND = bin_of(1.03)
CALLS = st.lists(st.tuples(st.floats(0, 1e5), st.booleans()), max_size=40)


def test_edges_double_every_four_bins() -> None:
    assert len(EDGES) == 98
    assert EDGES[0] == 0.0
    assert EDGES[1] == 0.001
    assert EDGES[5] == 0.002
    assert EDGES[41] == 1.024
    assert bin_of(0.0) == 0
    assert bin_of(0.001) == 1
    assert bin_of(1e9) == NUM_BINS


def test_without_a_prior_it_is_the_share_of_calls_that_took_longer() -> None:
    calls = Durations()
    for seconds in (0.0015, 0.0015, 0.5, 20.0):
        calls.add(seconds)
    curve = calls.posterior(UNKNOWN, 0.0)
    assert [curve.at(edge)[0] for edge in (0.001, 0.002, 0.4, 1.024, 30.0)] == [1.0, 0.5, 0.5, 0.25, 0.0]


def test_a_call_that_was_cut_is_no_duration() -> None:
    calls = Durations()
    for seconds, is_cut in ((0.5, False), (1.03, True), (1.03, True), (40.0, False)):
        calls.add(seconds, is_cut=is_cut)
    curve = calls.posterior(UNKNOWN, 0.0)
    assert curve.survival[SECOND + 1] == 0.75, "the two that were cut at a second did not end there"
    assert curve.at(30.0)[0] == 0.75
    assert curve.at(60.0)[0] == 0.0


def test_kaplan_and_meier_by_hand() -> None:
    """Ended at 1, 2 (of 4 at risk, then 2): 3/4, then 3/4 * 1/2; cut at 1.5 and 8."""
    calls = Durations()
    for seconds, is_cut in ((1.0, False), (1.5, True), (2.0, False), (8.0, True)):
        calls.add(seconds, is_cut=is_cut)
    curve = calls.posterior(UNKNOWN, 0.0)
    assert curve.survival[bin_of(1.0) + 1] == 0.75
    assert curve.survival[bin_of(2.0) + 1] == 0.375
    assert curve.survival[-1] == 0.375


def test_a_prior_weighs_as_much_as_so_many_calls() -> None:
    prior = Curve.of((1.0,) + (0.5,) * SECOND + (0.0,) * (NUM_BINS - SECOND))
    calls = Durations(prior)
    for _ in range(8):
        calls.add(0.0)
    assert calls.posterior(prior, 8.0).survival[1] == 1 - (8 + 8 * 0.5) / (8 + 8)


def test_of_a_tool_nobody_knows_half_the_calls_take_a_second() -> None:
    curve = Durations().curve
    assert curve.survival == pytest.approx(UNKNOWN.survival, abs=1e-12)
    assert curve.at(1.0)[0] == pytest.approx(0.5, abs=0.002)
    assert Measured(curve, 10.0).outlasts(10.0) == pytest.approx(11 / 21, abs=0.002), "as long again"


def test_only_the_last_calls_count() -> None:
    calls, fresh = Durations(), Durations()
    for _ in range(WINDOW):
        calls.add(100.0)
    for durations in (calls, fresh):
        for _ in range(WINDOW):
            durations.add(0.5)
    assert len(calls) == WINDOW
    assert calls.posterior(UNKNOWN, 8.0) == fresh.posterior(UNKNOWN, 8.0)


def test_what_is_left_by_hand() -> None:
    """Uniform over the bin from 1.024 to 1.218 s: half of it after half of it."""
    curve = Curve.of((1.0,) * 42 + (0.0,) * (NUM_BINS + 1 - 42))
    low, high = EDGES[41], EDGES[42]
    middle = (low + high) / 2
    assert Measured(curve, 0.0).outlasts(middle) == pytest.approx(0.5)
    assert Measured(curve, 0.0).within(math.inf) == pytest.approx(middle)
    assert Measured(curve, middle).within(math.inf) == pytest.approx((high - middle) / 2)
    assert Measured(curve, middle).within((high - middle) / 2) == pytest.approx((high - middle) * 3 / 8)


def test_a_deadline_ends_a_call() -> None:
    left = Measured(UNKNOWN, 5.0, limit=2.0)
    assert left.outlasts(2.0) == 0.0
    assert left.outlasts(1.9) == pytest.approx(6 / 7.9, abs=0.005)
    assert left.within(math.inf) == left.within(2.0) < 2.0
    assert Measured(UNKNOWN, 1e9, limit=3.0).within(math.inf) == pytest.approx(3.0)


def test_a_tools_own_word() -> None:
    """Log-uniform from 1 to 4 s: half of it is longer than 2 s; the mean is 3 / ln 4."""
    left = Foretold(2.0)
    assert left.outlasts(1.0) == 1.0
    assert left.outlasts(2.0) == pytest.approx(0.5)
    assert left.outlasts(4.0) == 0.0
    assert left.within(math.inf) == pytest.approx(3 / math.log(4))
    assert left.within(0.5) == 0.5
    assert Foretold(2.0, limit=0.25).within(math.inf) == 0.25


def test_classes_fall_back_to_their_tool_and_tools_to_all() -> None:
    times = ToolTimes()
    for _ in range(64):
        times.add("python", "short", 0.01)
        times.add("python", "long", 30.0)
    assert times.remaining("python", "short", 0.0).outlasts(1.0) < 0.1
    assert times.remaining("python", "long", 0.0).outlasts(1.0) > 0.9
    for tool in ("python", "search"):
        assert times.remaining(tool, "new", 0.0).outlasts(1.0) == pytest.approx(0.5, abs=0.05)


def test_a_word_that_is_past_is_not_believed() -> None:
    times = ToolTimes()
    assert isinstance(times.remaining("python", "", 3.0, eta=1.0), Foretold)
    assert times.remaining("python", "", 3.0, eta=-0.1).held(1.0) == times.remaining("python", "", 3.0).held(1.0)


def test_names_without_end_take_no_memory_without_end() -> None:
    times = ToolTimes()
    for number in range(MOST_CLASSES + 100):
        times.add(f"tool{number}", f"class{number}", 0.1)
    assert len(times._tools) == len(times._classes) == MOST_CLASSES
    assert times.remaining("tool1100", "", 0.0).outlasts(0.2) < 0.1, "known with all others"


@given(CALLS)
def test_survival_falls_from_one_and_its_integral_grows(calls: list[tuple[float, bool]]) -> None:
    durations = Durations()
    for seconds, is_cut in calls:
        durations.add(seconds, is_cut=is_cut)
    curve = durations.curve
    assert curve.survival[0] == 1.0
    assert curve.survival[-1] >= 0.0
    assert all(before >= after for before, after in pairwise(curve.survival))
    assert all(before <= after for before, after in pairwise(curve.area))


@given(CALLS, st.floats(0, 1e6), st.floats(0, 1e5), st.floats(0, 1e5), st.one_of(st.none(), st.floats(0, 1e4)))
def test_what_is_left_is_a_distribution(
    calls: list[tuple[float, bool]], elapsed: float, one: float, other: float, eta: float | None
) -> None:
    times = ToolTimes()
    for seconds, is_cut in calls:
        times.add("tool", "", seconds, is_cut=is_cut)
    left = times.remaining("tool", "", elapsed, eta=eta)
    low, high = min(one, other), max(one, other)
    assert 0.0 <= left.outlasts(high) <= left.outlasts(low) <= 1.0
    assert 0.0 <= left.within(low) <= left.within(high) * (1 + 1e-9) + 1e-6
    assert left.within(high) <= high * (1 + 1e-6) + 1e-6
