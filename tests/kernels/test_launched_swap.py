"""Pages to and from one stretch: exact, whatever the pages hold."""

import pytest
import torch

from agentrt_kernels.pages import PageLayout
from agentrt_kernels.quantized.reference import SCALE_SIZE
from agentrt_kernels.swap import launch, reference


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (torch.float32, PageLayout(16, 3, 2, 80)),
        (torch.bfloat16, PageLayout(1, 1, 1, 1)),
        (torch.int8, PageLayout(3, 2, 1, 5, SCALE_SIZE)),
        (torch.int8, PageLayout(3, 1, 1, 5)),
    ],
)
def test_gather_and_scatter_are_exact(device: str, dtype: torch.dtype, layout: PageLayout) -> None:
    """Random bits, so NaN of every kind too."""
    size = dtype.itemsize
    pool = torch.randint(0, 256, (8 * layout.page_stride * size,), dtype=torch.uint8, device=device).view(dtype)
    pages_P = torch.tensor([5, 0, 3], device=device)
    staged_PE = launch.gather_pages(pool, layout, pages_P)
    assert torch.equal(staged_PE.view(torch.uint8), reference.gather_pages(pool, layout, pages_P).view(torch.uint8))
    targets_P = torch.tensor([1, 6, 2], device=device)
    expected = pool.clone()
    reference.scatter_pages(expected, layout, targets_P, staged_PE)
    launch.scatter_pages(pool, layout, targets_P, staged_PE)
    assert torch.equal(pool.view(torch.uint8), expected.view(torch.uint8))


def test_no_pages(device: str) -> None:
    layout = PageLayout(2, 1, 1, 4)
    pool, none_P = torch.randn(3 * layout.page_stride, device=device), torch.empty(0, dtype=torch.int64, device=device)
    before = pool.clone()
    launch.scatter_pages(pool, layout, none_P, launch.gather_pages(pool, layout, none_P))
    assert torch.equal(pool, before)
