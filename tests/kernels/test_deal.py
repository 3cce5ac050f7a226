"""Tasks dealt among threads: each is done once, a phase ends before the next begins, and nobody need be there."""

from threading import Thread
from typing import Any

import numpy as np
import pytest

from agentrt_kernels.compiled import ordered
from agentrt_kernels.deal import finish, new_counters, take, wait

PHASES, TASKS = 200, 7


@ordered()
def _sum_of_before(counters: Any, done: Any) -> None:
    """Each task of a phase writes the sum of the phase before and 1."""
    phase = 0
    for row in range(1, done.shape[0]):
        going = True
        while going:
            task = take(counters, phase, done.shape[1])
            going = task >= 0
            if going:
                done[row, task] += done[row - 1].sum() + 1
                finish(counters, phase)
        phase = wait(counters, phase, done.shape[1])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_phases_follow_one_another(threads: int) -> None:
    done, counters = np.zeros((PHASES + 1, TASKS), dtype=np.int64), new_counters(PHASES)
    others = [Thread(target=_sum_of_before, args=(counters, done)) for _ in range(threads - 1)]
    for other in others:
        other.start()
    _sum_of_before(counters, done)
    expected = 0
    with np.errstate(over="ignore"):
        for row in done[1:]:
            expected = (expected * TASKS + 1) % 2**64
            assert (row.view(np.uint64) == expected).all()
    for other in others:
        other.join()
