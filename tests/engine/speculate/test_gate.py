"""The gate: how many drafted ids pay, from step times and past acceptances."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agentrt.engine.speculate.gate import PLAIN_EVERY, PROBE_EVERY, PROBE_LENGTH, VAIN_SHARE, Gate, choose_lengths
from agentrt.engine.speculate.survival import Own, Standing, Survival
from agentrt.engine.speculate.times import FIRST, RENEWED, Curve, Line, StepTimes


def times(plain: dict[int, float], drafted: dict[int, float]) -> StepTimes:
    """What steps of so many requests take, and what so many drafted rows add."""
    found = StepTimes()
    for requests, seconds in plain.items():
        found.plain.note(requests, seconds)
    for rows, seconds in drafted.items():
        for _ in range(2):  # the first one is left out
            found.drafted.note(rows, seconds)
    return found


def chosen(*args: Any) -> list[int]:
    return choose_lengths(*args).lengths


def powers(*rates: float, length: int = 10) -> NDArray[np.float64]:
    """Drafts of which each id stands with one chance if all before it do."""
    return np.array([[rate ** (depth + 1) for depth in range(length)] for rate in rates])


def test_a_curve_is_a_line_between_what_was_measured() -> None:
    found = Curve()
    assert [found.of(count) for count in (1, 4)] == [1, 1]
    found.note(1, 10.0)
    assert [found.of(count) for count in (1, 4)] == [10, 10]
    found.note(5, 14.0)
    assert [found.of(count) for count in (1, 2, 5, 9)] == [10, 11, 14, 18]
    assert [found.measured(count) for count in (1, 2, 5, 9)] == [10, float("inf"), 14, float("inf")]
    found.note(2, 500.0)  # more than a larger count took: what is between them is both's
    assert [found.of(count) for count in (1, 2, 5)] == [10, 257, 257]


def test_neighbouring_counts_share_what_is_known_and_the_first_shortest_counts() -> None:
    found = Curve()
    for seconds in (500.0, 10.0, 12.0, 11.0):
        found.note(30, seconds)
    assert found.of(32) == found.of(30) == 10
    for _ in range(RENEWED):
        found.note(33, 20.0)
    assert 12 < found.of(32) < 14


def test_a_line_is_something_at_all_and_as_much_for_each() -> None:
    found = Line()
    assert not found.is_known
    assert (found.of(0), found.of(9)) == (0, 0)
    found.note(4, 900.0)  # it compiled
    assert not found.is_known
    found.note(4, 2.0)
    assert [found.of(count) for count in (0, 2, 4, 8)] == [0, 1, 2, 4]
    for _ in range(300):
        found.note(4, 2.0)
        found.note(8, 3.0)
    assert [found.of(count) for count in (0, 4, 8, 12)] == pytest.approx([0, 2, 3, 4], abs=0.05)
    always, each = found.parts()
    assert [always + 4 * each, always + 12 * each] == pytest.approx([found.of(4), found.of(12)])


@pytest.mark.parametrize(
    ("four", "eight", "expected"), [(1.0, 4.0, (0, 0.45)), (3.0, 2.0, (2.5, 0)), (-1.0, -2.0, (0, 0))]
)
def test_no_part_of_a_line_is_below_nothing(four: float, eight: float, expected: tuple[float, float]) -> None:
    found = Line()
    for _ in range(300):
        found.note(4, four)
        found.note(8, eight)
    assert (found.of(1) - found.of(2) + found.of(1), found.of(2) - found.of(1)) == pytest.approx(expected, abs=0.05)


def test_what_drafts_add_is_what_a_step_takes_beside_a_plain_one() -> None:
    found = StepTimes()
    found.note(4, 8, 15.0)
    assert not found.is_known  # no plain step was seen
    for _ in range(FIRST):
        found.note(4, 0, 10.0)
    for _ in range(2):
        found.note(4, 8, 13.0)
    assert (found.plain.of(4), found.drafted.of(8)) == (10, 3)
    found.note(4, 8, 1000.0)  # the machine did something else: counts as three times what was expected
    assert found.drafted.of(8) == pytest.approx((0.98 * 3 + 39 - 10) / 1.98, rel=0.01)


def test_steps_with_prompts_teach_what_drafts_add_too() -> None:
    found = StepTimes()
    found.note(4, 0, 15.0, 10)
    assert not found.prompts.is_known  # no plain step was seen
    found.note(4, 0, 10.0)
    found.note(4, 8, 13.0, 20)
    assert not found.drafted.is_known  # nor one with prompts alone
    for _ in range(100):
        found.note(4, 0, 12.0, 10)
        found.note(4, 0, 14.0, 20)
    for _ in range(2):
        found.note(4, 8, 17.0, 20)
    assert found.prompts.of(20) == pytest.approx(4, abs=0.02)
    assert found.drafted.of(8) == pytest.approx(3, abs=0.3)


def test_survival_is_by_depth() -> None:
    """Half of the drafts stand whole and half not at all: 0.5 at every depth, and no power of a mean."""
    found = Survival()
    np.testing.assert_allclose(found.curve(3), [0.7, 0.49, 0.343])
    for _ in range(300):
        found.note(4, 4)
        found.note(4, 0)
    np.testing.assert_allclose(found.curve(4), 0.5, atol=0.02)
    assert found.curve(8)[7] == pytest.approx(0.5, abs=0.1)  # not tried so deep: as the depth before


def test_survival_of_drafts_that_were_cut() -> None:
    """Kaplan and Meier: drafts of one id say nothing of the second."""
    found, rng = Survival(), random.Random(0)
    for _ in range(4000):
        stood = (rng.random() < 0.8) + 0
        stood += stood and rng.random() < 0.5
        length = rng.choice([1, 2])
        found.note(length, min(stood, length))
    np.testing.assert_allclose(found.curve(2), [0.8, 0.4], atol=0.1)


def test_a_request_is_compared_to_its_kind() -> None:
    own = Own()
    assert own.factor == 1
    for _ in range(100):
        own.note(1, 2.0)
    assert own.factor == pytest.approx(0.5, abs=0.02)


def test_lengths_by_hand() -> None:
    """A step takes 10, a drafted row 1. E = 1 + a + a^2 + ...; a = 0.8: best at 6, 3.95 / 16 against 1 / 10."""
    cheap = times({1: 10.0}, {10: 10.0})
    speeds = [sum(0.8**depth for depth in range(count + 1)) / (10 + count) for count in range(11)]
    assert chosen([10], powers(0.8), cheap) == [int(np.argmax(speeds))] == [6]
    assert chosen([3], powers(0.8), cheap) == [3]
    assert chosen([10], powers(0.05), cheap) == [0]
    assert chosen([10], np.array([[0.5] * 10]), cheap) == [10]  # what stands at all stands whole


def test_rows_go_where_they_bring_most() -> None:
    found = chosen([4, 4, 4], powers(0.9, 0.6, 0.7), times({3: 10.0}, {12: 6.0}))
    assert found[0] == 4
    assert found[0] >= found[2] >= found[1] > 0


def test_who_gains_matters_where_the_batch_is_done_together() -> None:
    """One of 16 gains 0.9 ids a step: 5.6 % more ids. If it is always that one, the batch is done no sooner."""
    flat = times({1: 10.0, 32: 10.0}, {32: 0.0})
    limits, survivals_SJ = [1] + [0] * 15, powers(*[0.9] * 16)
    assert choose_lengths(limits, survivals_SJ, flat) == (limits, pytest.approx(10 - 10 / (1 + 0.9 / 16)))
    assert chosen(limits, survivals_SJ, flat, 0.0, (), 0.0, [0.9] + [0.0] * 15) == [0] * 16
    assert chosen(limits, survivals_SJ, flat, 0.0, (), 0.0, [0.9] + [0.5] * 15) == limits


def test_steps_become_cheaper_as_requests_end() -> None:
    """Of two, one gains an id a step: after half the time a step takes 6 instead of 10."""
    known = times({1: 6.0, 2: 10.0}, {1: 1.0})
    found = choose_lengths([1, 0], powers(1.0, 1.0), known, 0.0, (), 0.0, [1.0, 0.0])
    assert found == ([1, 0], pytest.approx(10 - (0.5 * 11 + 0.5 * 6)))


def test_a_request_is_taken_for_one_like_the_others_at_first() -> None:
    found = Standing()
    assert found.note(3.0, 0.0) == pytest.approx(1.0)
    assert found.note(3.0, 0.0) == pytest.approx(3 * 1.95 / 3.95)
    for _ in range(200):
        standing = found.note(0.0, 2.0)
    assert standing == pytest.approx(2 * 2 / (20 + 2), rel=0.01)


@pytest.mark.parametrize(("rate", "expected"), [(0.2, 0), (0.24, 1)])
def test_off_under_three_per_cent(rate: float, expected: int) -> None:
    """(1 + a) / 1.2 is 1.03 at a = 0.236."""
    assert chosen([1], powers(rate), times({1: 10.0}, {1: 2.0})) == [expected]


def test_no_drafts_no_rows() -> None:
    known = times({1: 1.0}, {1: 0.0})
    assert chosen([], powers(), known) == []
    assert chosen([0, 0], powers(0.9, 0.9), known) == [0, 0]


def test_what_was_never_measured_is_not_relied_on() -> None:
    """Rows look free before one was measured: the gate tries two ids of each draft, and decides when it has seen it."""
    gate = Gate()
    assert gate.choose([8], powers(0.9)) == [0]
    gate.note_step(1, 0, 1.0)
    assert chosen([8], powers(0.9), gate.times) == [0]
    assert gate.choose([8], powers(0.9)) == [PROBE_LENGTH]
    gate.note_step(1, 2, 9.0)
    assert gate.choose([8], powers(0.9)) == [PROBE_LENGTH]  # the first one may have compiled something
    gate.note_step(1, 2, 1.1)
    assert gate.choose([8], powers(0.9)) == [8]


def test_the_look_for_drafts_is_part_of_their_price() -> None:
    """2 ids in 12 + look against 1 in 10."""
    cheap = times({1: 10.0}, {1: 2.0})
    assert chosen([1], powers(1.0), cheap, 7.0) == [1]
    assert chosen([1], powers(1.0), cheap, 8.0) == [0]


def test_a_models_passes_are_part_of_their_price() -> None:
    """2 ids in 12 and a pass against 1 in 10; the passes of the longest draft of the model count, text costs none."""
    cheap = times({1: 10.0}, {1: 2.0})
    assert chosen([1], powers(1.0), cheap, 0.0, [0], 7.0) == [1]
    assert chosen([1], powers(1.0), cheap, 0.0, [0], 8.0) == [0]
    assert chosen([1], powers(1.0), cheap, 0.0, [], 8.0) == [1]
    flat = times({1: 10.0}, {8: 0.0})
    assert chosen([8], powers(0.9), flat, 0.0, [0], 4.0) == [4]  # 26 / 4.10; with 2 18 / 2.71, with 7 38 / 5.70


def test_looks_and_passes_do_not_count_as_the_steps_own() -> None:
    gate = Gate()
    gate.begin()
    gate.note_look([0], 0.5)
    gate.note_step(1, 0, 1.5)
    gate.begin()
    gate.note_passes(1, 3, 0.6)
    gate.note_step(1, 3, 1.8)
    gate.note_step(1, 3, 1.8)
    assert (gate.times.plain.of(1), gate.passes.of(1)) == (1.0, pytest.approx(0.2))
    assert gate.times.drafted.of(3) == pytest.approx(0.2)


def test_looks_in_vain_cost_half_a_hundredth_of_the_time() -> None:
    gate = Gate()
    gate.times = times({2: 1.0}, {2: 5.0})
    looks = 0
    for _ in range(5000):
        gate.begin()
        is_looking = gate.wakes()
        if is_looking:
            looks += 1
            gate.note_look(gate.choose([0, 0], powers(0.7, 0.7)), 0.5)
        gate.note_step(2, 0, 1.0 + 0.5 * is_looking)
    assert 0.5 * looks / 5000 == pytest.approx(VAIN_SHARE, rel=0.05)


def test_what_drafts_save_pays_for_looks() -> None:
    """Each draft that pays saves enough for one look in vain and the start of another."""
    gate = Gate()
    gate.times = times({1: 1.0}, {1: 0.0})
    looks = []
    for step in range(1, 60):
        gate.begin()
        looks.append(gate.wakes())
        if looks[-1]:
            gate.note_look(gate.choose([step % 3 and 8], powers(1.0)), 0.1)
        gate.note_step(1, 0, 1.0)
    assert all(looks)


def test_a_shut_gate_verifies_some_now_and_then() -> None:
    """One id more doubles the time, so it is shut; each probe is two ids of each draft, and they become rare."""
    gate = Gate()
    gate.times = times({1: 1.0}, {1: 1.0})
    found = []
    for step in range(4 * PROBE_EVERY + 1):
        gate.begin()
        lengths = gate.choose([8], powers(0.5)) if gate.wakes() else [0]
        if lengths != [0]:
            assert lengths == [PROBE_LENGTH]
            found.append(step)
        gate.note_step(1, 0, 1.0)
    apart = [after - before for before, after in itertools.pairwise(found)]
    assert apart == [4, 8, 16, 32, 64, 128, 256, 512, 512, 512]


def test_an_open_gate_measures_plain_steps_too() -> None:
    gate = Gate()
    awake = []
    for _ in range(2 * PLAIN_EVERY):
        awake.append(gate.wakes())
        gate.note_step(4, 0, 1.0)
    assert awake.count(False) == 2
