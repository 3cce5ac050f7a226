"""How our CPU functions are compiled, and what they share: numba options, thread launch, exponentials.

**Exact rows.** No function lets one row's arithmetic depend on another row. `ordered` keeps the order of operations as
written (it may fuse a product and a sum). `reducing` lets the compiler re-order the sum of one loop, so that it becomes
vector code; the order it chooses is fixed in the compiled code and varies only with the loop's length, which is a property
of the row (head size, width, its own position). `parallel` functions are loops over independent rows.

**Threads.** `launching` wraps each call of a `parallel` function: numba takes whichever threading layer is there (GNU OpenMP on
most Linux systems, else its own work queue, which aborts the process when two threads launch at once), so launches of one
process follow one another. The number of threads is torch's.

numba's cache of compiled code looks at the file of the outer function only: after a change here, touch the kernels' files.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numba
import numpy as np
import torch

ordered = partial(numba.njit, cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
reducing = partial(numba.njit, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
parallel = partial(numba.njit, cache=True, nogil=True, error_model="numpy", fastmath={"contract"}, parallel=True)

_launch = threading.Lock()


@contextmanager
def launching() -> Iterator[None]:
    """The block may call `parallel` functions."""
    with _launch:
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        yield


@ordered()
def exp32(x: float) -> float:
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


@ordered()
def exp64(x: float) -> float:
    """e^x in float64 for x <= 0 within 1 ulp or so (Cephes), written so that loops over it become vector code; 0 below -708."""
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
