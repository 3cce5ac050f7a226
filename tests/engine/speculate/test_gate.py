"""The gate: how many drafted ids pay, from step times and past acceptances."""

import numpy as np
import pytest

from agentrt.engine.speculate.gate import (
    PLAIN_EVERY,
    PROBE_EVERY,
    PROBE_LENGTH,
    Gate,
    Rate,
    StepTimes,
    choose_lengths,
)


def times(**seconds: float) -> StepTimes:
    found = StepTimes()
    for rows, value in seconds.items():
        found.note(int(rows.removeprefix("r")), value)
    return found


def test_step_times_are_a_line_between_what_was_measured() -> None:
    found = times(r1=10.0, r5=14.0)
    assert [found.of(rows) for rows in (1, 2, 5, 9)] == [10, 11, 14, 18]
    assert [StepTimes().of(rows) for rows in (1, 4)] == [1, 1]


def test_a_step_that_was_interrupted_does_not_count_against_larger_ones() -> None:
    found = times(r1=10.0, r2=500.0, r8=20.0)
    assert [found.of(rows) for rows in (1, 2, 8)] == [10, 20, 20]
    found.note(2, 11.0)
    found.note(2, 11.0)
    assert found.of(2) < 140


def test_neighbouring_counts_share_what_is_known() -> None:
    found = times(r30=10.0, r34=10.0)
    assert found.of(32) == 10
    found.note(33, 4.0)
    assert found.of(32) == 7


def test_a_rate_follows_what_was_accepted() -> None:
    rate = Rate()
    assert rate.mean() == 0.7
    for _ in range(200):
        rate.note(4, 1)  # one accepted, the second refused, the others never judged
    assert rate.mean() == pytest.approx(0.5, abs=0.01)
    for _ in range(200):
        rate.note(4, 4)
    assert rate.mean() > 0.98
    assert Rate().mean(0.2, 4.0) == 0.2


def test_lengths_by_hand() -> None:
    """Alone: 1 row costs 10, each more 1. E = 1 + a + a^2 + ...; a = 0.8: best at 7, 4.16 / 17 against 1 / 10."""
    cheap = times(r1=10.0, r11=20.0)
    speeds = [sum(0.8**depth for depth in range(count + 1)) / (10 + count) for count in range(11)]
    assert choose_lengths([10], [0.8], cheap) == [int(np.argmax(speeds))] == [6]
    assert choose_lengths([3], [0.8], cheap) == [3]
    assert choose_lengths([10], [0.05], cheap) == [0]


def test_rows_go_where_they_bring_most() -> None:
    found = choose_lengths([4, 4, 4], [0.9, 0.6, 0.7], times(r3=10.0, r15=16.0))
    assert found[0] == 4
    assert found[0] >= found[2] >= found[1] > 0


def test_slow_requests_hold_up_the_batch() -> None:
    """One of 16 gains 0.9 ids a step: 5.6 % more ids, but the batch is done 2.8 % sooner at best."""
    flat = times(r1=10.0, r32=10.0)
    assert choose_lengths([1] + [0] * 15, [0.9] * 16, flat) == [0] * 16
    assert choose_lengths([1] * 2 + [0] * 14, [0.9] * 16, flat) == [1] * 2 + [0] * 14


@pytest.mark.parametrize(("rate", "expected"), [(0.2, 0), (0.24, 1)])
def test_off_under_three_per_cent(rate: float, expected: int) -> None:
    """(1 + a) / 1.2 is 1.03 at a = 0.236."""
    assert choose_lengths([1], [rate], times(r1=10.0, r2=12.0)) == [expected]


def test_no_drafts_no_rows() -> None:
    assert choose_lengths([], [], times(r1=1.0)) == []
    assert choose_lengths([0, 0], [0.9, 0.9], times(r1=1.0)) == [0, 0]


def test_the_look_for_drafts_is_part_of_their_price() -> None:
    """2 ids in 12 + look against 1 in 10."""
    cheap = times(r1=10.0, r2=12.0)
    assert choose_lengths([1], [1.0], cheap, 7.0) == [1]
    assert choose_lengths([1], [1.0], cheap, 8.0) == [0]


def test_a_models_passes_are_part_of_their_price() -> None:
    """2 ids in 12 and a pass against 1 in 10; the passes of the longest draft of the model count, text costs none."""
    cheap = times(r1=10.0, r2=12.0)
    assert choose_lengths([1], [1.0], cheap, 0.0, [0], 7.0) == [1]
    assert choose_lengths([1], [1.0], cheap, 0.0, [0], 8.0) == [0]
    assert choose_lengths([1], [1.0], cheap, 0.0, [], 8.0) == [1]
    flat = times(r1=10.0, r9=10.0)
    assert choose_lengths([8], [0.9], flat, 0.0, [0], 4.0) == [4]  # 26 / 4.10; with 2 18 / 2.71, with 7 38 / 5.70


def test_looks_in_vain_cost_a_hundredth_of_the_time() -> None:
    gate = Gate()
    looks = 0
    for _ in range(5000):
        if gate.wakes():
            looks += 1
            gate.note_look(gate.choose([0, 0], [0.7, 0.7]), 0.5)
        gate.note_step(2, 1.0)
    assert 0.008 < 0.5 * looks / 5000 < 0.015


def test_a_shut_gate_verifies_some_now_and_then() -> None:
    """One id more doubles the time, so it is shut; each probe is two ids of each draft."""
    gate = Gate()
    for rows in (1, 2):
        gate.note_step(rows, float(rows))
    found = []
    for _ in range(4 * PROBE_EVERY):
        if gate.wakes():
            found.append(gate.choose([8], [0.5]))
        gate.note_step(1, 1.0)
    assert [lengths for lengths in found if lengths != [0]] == [[PROBE_LENGTH]] * 4


def test_an_open_gate_measures_plain_steps_too() -> None:
    gate = Gate()
    awake = []
    for _ in range(2 * PLAIN_EVERY):
        awake.append(gate.wakes())
        gate.note_step(4, 1.0)
    assert awake.count(False) == 2
