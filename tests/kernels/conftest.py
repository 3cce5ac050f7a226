"""Random pages for the kernels' tests."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from agentrt_kernels.pages import PageLayout


class Paged(NamedTuple):
    """Rows of several sequences, and a pool full of random KV with shuffled pages."""

    positions_N: Tensor
    table_of_N: Tensor
    tables_SP: Tensor
    pool: Tensor
    layout: PageLayout


@pytest.fixture
def make_paged() -> Callable[..., Paged]:
    def make(
        rows: list[tuple[int, int]], page_size: int, kv_heads: int, head_dim: int, layers: int = 2, parts: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> Paged:  # fmt: skip
        """`rows` are (sequence, position)."""
        generator = torch.Generator().manual_seed(page_size * 100 + head_dim)
        layout = PageLayout(page_size, layers, kv_heads, head_dim, parts=parts)
        sequences = 1 + max(sequence for sequence, _ in rows)
        pages = 1 + max(position for _, position in rows) // page_size
        shuffled = torch.randperm(sequences * pages, generator=generator)
        return Paged(
            positions_N=torch.tensor([position for _, position in rows]),
            table_of_N=torch.tensor([sequence for sequence, _ in rows], dtype=torch.int32),
            tables_SP=shuffled.to(torch.int32).view(sequences, pages),
            pool=torch.randn(sequences * pages * layout.page_stride, generator=generator).to(dtype),
            layout=layout,
        )

    return make
