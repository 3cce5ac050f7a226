"""How our CPU functions are compiled and spread over threads, and the exponentials they share.

**Exact rows.** No function lets one row's arithmetic depend on another row. `ordered` keeps the order of operations
as written (it may fuse a product and a sum). `reducing` lets the compiler re-order the sum of one loop, so that it
becomes vector code; the order it chooses is fixed in the compiled code and varies only with the loop's length, which
is a property of the row (head size, width, its own position). `spread` cuts a call into ranges of rows, so threads
change nothing either. numba compiles a function anew for another memory layout, and the two may differ in the last
bit (one row of a strided array counts as contiguous, two do not), so everything is passed through `array`.

**Threads** are a pool of our own; compiled code runs without the interpreter's lock. Not numba's `parallel`: its
OpenMP layer sets the thread count of torch's OpenMP too (they share a symbol), its work queue aborts the process when
two engines launch at once, and either triples the time to compile.

**What a first run compiles** is kept small. LLVM optimises a function again in every function that it is part of, so what has
one caller is part of it by numba (`inline="always"`), but for the large ones: there numba copies more than LLVM saves. Each
function of numpy is compiled too, where a loop does; so is a function once more for an argument that is written as a number
or a truth (numba takes `0` for a type, and not `np.int64(0)`).

numba's cache of compiled code looks at the file of the outer function only: after a change here, touch the kernels'
files.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

SPREAD_ABOVE_NANOSECONDS = 3_000_000
"""A call with less work stays in its thread. To hand work over takes some 50 microseconds, and where the system wakes the other
thread on this one's core, as it did in up to six of ten calls on a machine of two, there is nothing in it for milliseconds."""

ordered = partial(numba.njit, cache=True, nogil=True, error_model="numpy", fastmath={"contract"}, no_cfunc_wrapper=True)
inner = partial(ordered, no_cpython_wrapper=True)
"""`ordered`, for what compiled code alone calls (from Python the process would crash): what takes Python's objects apart is
a third of all that there is to compile."""
reducing = partial(inner, fastmath={"contract", "reassoc"})


def array(tensor: Tensor) -> Any:
    """A tensor's memory as a contiguous numpy array, float16 as its bits in uint16 (`half.py`).

    A strided tensor is copied, so write to contiguous ones only.
    """
    found = tensor.contiguous().numpy()
    return found.view(np.uint16) if found.dtype == np.float16 else found


def declared(builder: Any, name: str, returned: Any, *arguments: Any) -> Any:
    """A function from outside (LLVM's own, the C library's), for code that is written as LLVM instructions."""
    found = builder.module.globals.get(name)
    return ir.Function(builder.module, ir.FunctionType(returned, arguments), name) if found is None else found


def threads_for(nanoseconds: float) -> int:
    """How many threads share so much work."""
    return torch.get_num_threads() if nanoseconds >= SPREAD_ABOVE_NANOSECONDS else 1


def spread(kernel: Callable[..., None], tasks: int, nanoseconds: float, *args: Any) -> None:
    """`kernel(first, last, *args)` over all tasks, cut among torch's number of threads if it is much work."""
    threads = max(min(threads_for(nanoseconds), tasks), 1)
    cuts = [tasks * thread // threads for thread in range(threads + 1)]
    others = [_pool().submit(kernel, cuts[thread], cuts[thread + 1], *args) for thread in range(1, threads)]
    kernel(0, cuts[1], *args)
    for other in others:
        other.result()


def together(kernel: Callable[..., None], threads: int, *args: Any) -> None:
    """`kernel(*args)` in so many threads at once; it deals its work among them (`deal.py`).

    It has returned in this thread when all is done. Another one that came late may still be on its way through and finds
    nothing to do. It is not waited for, since to be woken by it takes longer.
    """
    others = [_pool().submit(kernel, *args) for _ in range(threads - 1)]
    kernel(*args)
    for other in others:
        other.cancel()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="agentrt-kernels")


# A forked child has the pool's object and none of its threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


@inner()
def exp32(x: Any) -> Any:
    """e^x in float32 within 1 ulp or so (Cephes), written so that loops over it become vector code; 0 below -87."""
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    y = p * r * r + r + np.float32(1.0)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0.0) if x < np.float32(-87.0) else y * power


@inner()
def ordered_bits(bits: Any) -> Any:
    """A float32's bits as an integer in the floats' order, and back: it is its own inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inner()
def sigmoid32(x: Any) -> Any:
    """1 / (1 + e^-x) in float32, for any x."""
    small = exp32(-abs(x))  # at most 1, so nothing overflows
    return (np.float32(1.0) if x >= 0 else small) / (np.float32(1.0) + small)


@inner()
def exp64(x: Any) -> Any:
    """e^x in float64 for x <= 0, as `exp32` is written; 0 below -708."""
    shifted = x * 1.4426950408889634 + 6755399441055744.0  # 1.5 * 2^52: the sum's low bits are the nearest integer
    n = shifted - 6755399441055744.0
    r = x - n * 6.93145751953125e-1
    r = r - n * 1.42860682030941723212e-6
    square = r * r
    p = (1.26177193074810590878e-4 * square + 3.02994407707441961300e-2) * square + 9.99999999999999999910e-1
    p = p * r
    q = (3.00198505138664455042e-6 * square + 2.52448340349684104192e-3) * square + 2.27265548208155028766e-1
    q = q * square + 2.0
    y = 1.0 + 2.0 * (p / (q - p))
    power = np.int64((np.float64(shifted).view(np.int64) + np.int64(1023)) << np.int64(52)).view(np.float64)
    return 0.0 if x < -708.0 else y * power
