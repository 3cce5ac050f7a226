"""The gate: how many drafted ids pay, from step times and past acceptances."""

import itertools
import random

import numpy as np
import pytest

from agentrt.engine.speculate.gate import (
    PLAIN_EVERY,
    PROBE_EVERY,
    PROBE_LENGTH,
    PUT_BY,
    REGRET,
    Gate,
    evenness,
    saved_by_an_id,
)
from agentrt.engine.speculate.survival import Survival
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
    assert found.of(32) == pytest.approx((10 + 8 * 20) / 9)  # that one and all after it
    for _ in range(8 * RENEWED):
        found.note(33, 10.0)
    assert found.of(32) == pytest.approx(10, abs=0.6)  # of late


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


def test_evenness_is_the_least_gain_over_the_mean_one() -> None:
    assert evenness([0, 0], [0, 30]) == 1  # nobody has gained anything
    assert evenness([50, 50], [100, 100]) == pytest.approx(1)
    assert evenness([900], [1000]) == 1
    assert evenness([1000, 0], [2000, 2000]) == pytest.approx(0, abs=0.01)
    assert evenness([5, 0], [10, 0]) > 0.9  # one that has just begun is taken for one like the others


def test_what_an_id_saves() -> None:
    """Steps of 1 and 3 requests take 6 and 10, so each request has 2 of its own and 4 are everybody's."""
    known = times({1: 6.0, 3: 10.0}, {1: 0.5})
    assert saved_by_an_id(1, known, 1.0) == pytest.approx(6)
    assert saved_by_an_id(3, known, 0.0) == pytest.approx(2)
    assert saved_by_an_id(3, known, 1.0) == pytest.approx(10 / 3)
    assert saved_by_an_id(3, known, 0.5) == pytest.approx(8 / 3)


def test_a_request_saves_no_less_than_a_drafted_row_takes_and_no_more_than_its_share() -> None:
    assert saved_by_an_id(8, times({8: 10.0}, {1: 0.5}), 0.0) == pytest.approx(0.5, rel=0.1)  # one count alone is known
    assert saved_by_an_id(8, times({1: 1.0, 8: 10.0}, {1: 0.1}), 0.0) == pytest.approx(10 / 8)


def settled(plain: float = 10.0, row: float = 1.0, requests: int = 1) -> Gate:
    """A gate that knows what steps take, and does not probe soon."""
    gate = Gate()
    gate.times, gate.purse = times({requests: plain}, {10: 10 * row}), PUT_BY * plain
    gate._probe_after = PROBE_EVERY
    return gate


def test_ids_are_taken_as_long_as_they_bring_what_they_cost() -> None:
    """A row takes 3 and an id saves 40, of which 30 are trusted, so one in ten has to stand; at twice the pace one in five."""
    gate = settled(40.0, 3.0)
    terms = gate.terms(1, 8)
    assert (terms.least(), terms.longest) == (pytest.approx(0.1, rel=0.02), 8)
    assert terms.least(6.0) == pytest.approx(0.3, rel=0.02)  # a model's pass is part of its price
    for _ in range(300):
        gate.terms(1, 8)
        gate.note_step(1, 2, 3, 46.0)  # 40 and three ids' 90 in 46: nearly three times the pace
    assert gate.terms(1, 8).least() == pytest.approx(0.1 * 130 / 46, rel=0.05)


@pytest.mark.parametrize(("ids", "expected"), [(0.31, False), (0.32, True)])
def test_off_under_three_per_cent(ids: float, expected: bool) -> None:
    """(1 + 0.75 ids) / 1.2 is 1.03 at 0.315."""
    gate = settled(row=2.0)
    gate.times = times({1: 10.0}, {1: 2.0})
    gate.terms(1, 8)
    assert gate.pays(ids, 1) == pytest.approx(expected)
    assert not gate.pays(ids, 1, 1.0)
    assert not gate.pays(0.0, 0)


def test_what_was_never_measured_is_tried_with_two_ids_each() -> None:
    gate = Gate()
    assert not gate.wakes()  # no plain step was seen
    gate.note_step(1, 0, 0, 1.0)
    for seconds in (9.0, 1.1):  # the first one may have compiled something
        assert gate.wakes()
        assert gate.terms(1, 8) == (0.0, 1.0, PROBE_LENGTH)
        assert gate.pays(0.0, 2)
        gate.note_step(1, 2, 2, seconds)
    gate._probe_after = PROBE_EVERY
    assert gate.terms(1, 8).longest == 8


def test_looks_and_passes_do_not_count_as_the_steps_own() -> None:
    gate = Gate()
    gate.note_look(0.5)
    gate.note_step(1, 0, 0, 1.5)
    gate.note_passes(1, 3, 0.6)
    gate.note_step(1, 3, 0, 1.8)
    for _ in range(9):
        gate.note_step(1, 3, 0, 1.2)
    assert (gate.times.plain.of(1), gate.passes.of(1)) == (1.0, pytest.approx(0.2))
    assert gate.times.drafted.of(3) == pytest.approx(0.2, rel=0.1)


def run(gate: Gate, steps: int, *, look: float, rows: int, stood: float, row: float = 0.1) -> float:
    """Steps of one request that take 1 and `row` for each of `rows`; a share of looks finds something. The time of all."""
    rng, spent = random.Random(0), 0.0
    for _ in range(steps):
        seconds, drafted, accepted = 1.0, 0, 0
        if gate.wakes():
            gate.terms(1, 8)
            gate.note_look(look)
            seconds += look
            if gate.pays(stood, rows):
                drafted, accepted = rows, int(rng.random() < stood)
                seconds += row * rows
        gate.note_step(1, drafted, accepted, seconds)
        spent += seconds - accepted
    return spent / steps


def test_looks_in_vain_cost_half_a_hundredth_of_the_time() -> None:
    """And beside that two steps at the start."""
    found = run(settled(1.0, 0.1), 20_000, look=0.05, rows=0, stood=0.0)
    assert found == pytest.approx(1 + REGRET + PUT_BY / 20_000, abs=0.0003)


def test_drafts_that_promise_more_than_they_keep_cost_as_little() -> None:
    """A row that costs a whole step was measured as one that costs nearly nothing, and no draft stands."""
    gate = settled(1.0, 0.1)
    gate.saves = lambda ids, rows, passes=0.0: 10.0  # type: ignore[method-assign]
    assert 1 < run(gate, 20_000, look=0.01, rows=4, stood=0.0) < 1 + REGRET + PUT_BY / 20_000 + 0.001


def test_what_drafts_save_pays_for_looks() -> None:
    gate = settled(1.0, 0.1)
    assert run(gate, 2000, look=0.1, rows=1, stood=0.5) < 0.72
    assert gate.purse <= PUT_BY * 1.01


def test_something_that_took_long_does_not_shut_the_gate_for_ever() -> None:
    gate = settled(1.0, 0.1)
    gate.terms(1, 8)
    for seconds in (30.0, 0.1, 30.0):  # the first one compiles, and then the machine does something else
        gate.note_look(seconds)
        gate.note_step(1, 0, 0, 1.0 + seconds)
        assert gate.wakes()
    gate.note_passes(1, 1, 30.0)
    gate.note_step(1, 0, 0, 31.0)
    steps = 0
    while not gate.wakes():
        gate.note_step(1, 0, 0, 1.0)
        steps += 1
    assert steps <= 2 / REGRET + 1


def test_a_shut_gate_verifies_some_now_and_then() -> None:
    """Each probe is two ids of each draft, and they become rare; the purse is full, so it does not hold them up."""
    gate = Gate()
    gate.times = times({1: 1.0}, {1: 1.0})
    found = []
    for step in range(4 * PROBE_EVERY + 1):
        gate.purse = 1.0
        terms = gate.terms(1, 8)
        rows = PROBE_LENGTH if gate.pays(0.0, PROBE_LENGTH) else 0
        if rows:
            assert terms.longest == PROBE_LENGTH
            found.append(step)
        gate.note_step(1, rows, 0, 1.0)
    apart = [after - before for before, after in itertools.pairwise(found)]
    assert apart == [5, 9, 17, 33, 65, 129, 257, 513, 513]


def test_an_open_gate_measures_plain_steps_too() -> None:
    gate = settled(requests=4)
    awake = []
    for _ in range(2 * PLAIN_EVERY):
        awake.append(gate.wakes())
        gate.note_step(4, 0, 0, 1.0)
    assert awake.count(False) == 2
