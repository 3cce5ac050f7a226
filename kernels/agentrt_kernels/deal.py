"""Threads that go through one compiled function together: tasks are dealt, a phase ends when all of its tasks are done.

A function of many short phases (a decoder's layers) is called by every thread with the same `counters`. In each phase a
thread takes tasks until none is left, and then waits for those that others took. Nobody waits for a thread that has taken
nothing: one that comes late, or never, finds phases done and passes through them, and meanwhile the others did its share.
So there is no number of threads that must be there, and nothing to deadlock. What a task computes does not depend on who
takes it.

Waiting is spinning, for a phase takes microseconds; after a while a thread lets others run between two looks.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from agentrt_kernels.compiled import declared, inner

LINE = 16
"""Counters that a phase has: two are used, and two cache lines keep it apart from its neighbours."""
PATIENCE = 2000
"""Looks before a waiting thread lets others run."""

Counters = NDArray[np.int64]


def new_counters(phases: int) -> Counters:
    """For one run of a function with at most so many phases."""
    return np.zeros(phases * LINE, dtype=np.int64)


def _typed_add(typing: Any, counters: Any, place: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(context, builder, signature, args), ir.IntType(64)(1), "seq_cst")

    return types.int64(counters, types.intp), generate


def _typed_read(typing: Any, counters: Any, place: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, args), "seq_cst", 8)

    return types.int64(counters, types.intp), generate


def _typed_yield(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(declared(builder, "sched_yield", ir.IntType(32)), [])

    return types.int32(), generate


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


_add: Callable[..., int] = intrinsic(_typed_add)
"""`_add(counters, place)` adds 1 and returns what was there before; all threads see one order of such additions."""
_read: Callable[..., int] = intrinsic(_typed_read)
"""`_read(counters, place)` returns what is there now; what was written before it came there can be read then."""
_let_others_run: Callable[..., int] = intrinsic(_typed_yield)
"""POSIX's sched_yield."""


@inner()
def take(counters: Any, phase: int, tasks: int) -> int:
    """The next task of a phase, or -1 if all are taken."""
    if _read(counters, phase * LINE) >= tasks:
        return -1
    task = _add(counters, phase * LINE)
    return task if task < tasks else -1


@inner()
def finish(counters: Any, phase: int) -> None:
    """Say that a task that was taken is done."""
    _add(counters, phase * LINE + LINE // 2)


@inner()
def wait(counters: Any, phase: int, tasks: int) -> int:
    """Return when all tasks of a phase are done; the next phase."""
    looks = 0
    while _read(counters, phase * LINE + LINE // 2) < tasks:
        looks += 1
        if looks > PATIENCE:
            _let_others_run()
    return phase + 1
