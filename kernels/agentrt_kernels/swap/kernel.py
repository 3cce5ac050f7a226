"""Pages to and from one contiguous stretch, as a Triton kernel: a program is a stretch of one page."""

import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def copy_pages_kernel(
    pool,
    pages_P,
    staged_PE,
    page_stride,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With GATHER from the pool to `staged_PE`, else back. Elements are moved as they are."""
    p = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < page_stride
    in_pool = pool + tl.load(pages_P + p).to(tl.int64) * page_stride + e
    staged = staged_PE + p * page_stride + e
    if GATHER:
        tl.store(staged, tl.load(in_pool, mask=inside), mask=inside)
    else:
        tl.store(in_pool, tl.load(staged, mask=inside), mask=inside)
