"""Copies of pages from one pool to another, on a GPU.

A page that crosses alone is one copy of the driver's, with no kernel. This is for pages so small that the driver's time
a copy (a few microseconds) is longer than the copy.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from agentrt_kernels.swap.kernel import BLOCK, copy_pages_kernel


def copy_pages(source_PB: Tensor, target_PB: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """As the reference has it; it does not wait for the copies.

    The pages' numbers are read on the device from where torch keeps memory of the host until the device is done with it.
    """
    if not sources:
        return
    device = source_PB.device if source_PB.device.type == "cuda" else target_PB.device
    pages_C2 = torch.tensor(list(zip(sources, targets, strict=True)), dtype=torch.int32)
    if device.type == "cuda":
        pages_C2 = pages_C2.pin_memory().to(device, non_blocking=True)
    page_bytes = source_PB.shape[1]
    word = torch.int32 if page_bytes % 4 == 0 else torch.uint8
    words = page_bytes // word.itemsize
    grid = (len(sources), triton.cdiv(words, BLOCK))
    copy_pages_kernel[grid](source_PB.view(word), target_PB.view(word), pages_C2, words, BLOCK=BLOCK)
