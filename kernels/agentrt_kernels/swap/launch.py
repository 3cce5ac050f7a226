"""Pages to and from one contiguous stretch, on a GPU.

A page that crosses alone is one copy of the driver's, with no kernel. This is for many pages, and for pages so small
that the driver's time a copy (a few microseconds) is longer than the copy.
"""

import torch
import triton
from torch import Tensor

from agentrt_kernels.pages import PageLayout
from agentrt_kernels.swap.kernel import BLOCK, copy_pages_kernel


def gather_pages(pool: Tensor, layout: PageLayout, pages_P: Tensor) -> Tensor:
    """Copies of the pages, one after another: `staged_PE`."""
    staged_PE = pool.new_empty(len(pages_P), layout.page_stride)
    _copy(pool, pages_P, staged_PE, gather=True)
    return staged_PE


def scatter_pages(pool: Tensor, layout: PageLayout, pages_P: Tensor, staged_PE: Tensor) -> None:
    """Put `staged_PE` into the pages; no page may be named twice."""
    _copy(pool, pages_P, staged_PE.contiguous(), gather=False)


def _copy(pool: Tensor, pages_P: Tensor, staged_PE: Tensor, gather: bool) -> None:
    """Elements are moved as integers, so that nothing rounds a NaN's bits; of 4 bytes if a page is a multiple of them."""
    if not len(pages_P):
        return
    page_bytes = staged_PE.shape[1] * staged_PE.element_size()
    word = torch.int32 if page_bytes % 4 == 0 else torch.uint8
    words = page_bytes // word.itemsize
    grid = (len(pages_P), triton.cdiv(words, BLOCK))
    copy_pages_kernel[grid](pool.view(word), pages_P, staged_PE.view(word), words, GATHER=gather, BLOCK=BLOCK)
