"""Copies of pages from one pool to another, as a Triton kernel: a program is a stretch of one page."""

import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def copy_pages_kernel(
    sources,
    targets,
    pages_C2,
    page_words,
    BLOCK: tl.constexpr,
):
    """`pages_C2` has the source and the target of each copy. Words are moved as they are."""
    pair = pages_C2 + tl.program_id(0) * 2
    w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = w < page_words
    source, target = tl.load(pair).to(tl.int64) * page_words, tl.load(pair + 1).to(tl.int64) * page_words
    tl.store(targets + target + w, tl.load(sources + source + w, mask=inside), mask=inside)
