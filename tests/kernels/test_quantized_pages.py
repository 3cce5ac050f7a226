"""Pages of int8 on the CPU: a key or value is written as it is rounded by definition, and attended as it was written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrt_kernels.paged_attention import reference as attention
from agentrt_kernels.pages import PageLayout
from agentrt_kernels.quantized import cpu
from agentrt_kernels.quantized.reference import SCALE_SIZE, dequantized_pool, quantize_rows
from agentrt_kernels.rotary import cpu as plain_rotary

ROWS = [(2, 9), (0, 3), (0, 4), (1, 0)]


def in_8_bits(pool: Tensor, layout: PageLayout) -> tuple[Tensor, PageLayout]:
    """The same pages in int8."""
    q_XD, scales_X = quantize_rows(pool.view(-1, layout.head_dim))
    tokens = layout.kv_heads * layout.page_size
    blocks = (q_XD.view(-1, tokens * layout.head_dim), scales_X.view(torch.int8).view(-1, tokens * SCALE_SIZE))
    return torch.cat(blocks, dim=1).flatten(), layout._replace(scale_size=SCALE_SIZE)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rows_are_rounded_into_their_places_and_nowhere_else(make_paged: Callable[..., Any], page_size: int) -> None:
    paged = make_paged(ROWS, page_size, kv_heads=2, head_dim=16)
    qkv_NE, angles_TR = torch.randn(4, (3 + 2 + 2) * 16), torch.arange(16).unsqueeze(1) * torch.rand(8)
    pool, layout = in_8_bits(paged.pool, paged.layout)
    written, before = pool.clone(), dequantized_pool(pool, layout)[0]
    tensors = (angles_TR.cos(), angles_TR.sin(), *paged[:3])
    q_NHD = cpu.rotary(qkv_NE.clone(), *tensors, written, layout, 1)
    plain = before.clone()
    assert torch.equal(q_NHD, plain_rotary.rotary(qkv_NE, *tensors, plain, paged.layout, 1))
    is_written_XD = (plain != before).view(-1, 16)
    q_XD, scales_X = quantize_rows(plain.view(-1, 16))
    rounded_XD = torch.where(is_written_XD, q_XD * scales_X.unsqueeze(1), before.view(-1, 16))
    assert is_written_XD.any(dim=1).sum() == 4 * 2 * 2
    assert torch.equal(dequantized_pool(written, layout)[0].view(-1, 16), rounded_XD)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_shows(make_paged: Callable[..., Any], odd: float) -> None:
    """No int8 says so: it was rounded to some number, and logits that should have failed their request were sampled from."""
    q_ND, scales_N = quantize_rows(torch.tensor([[1.0, odd, 3.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]))
    assert scales_N.isnan().tolist() == [True, False, False]
    assert (q_ND[1:] * scales_N[1:, None]).isfinite().all()
    paged = make_paged(ROWS, 4, kv_heads=2, head_dim=16)
    pool, layout = in_8_bits(paged.pool, paged.layout)
    qkv_NE, still_TR = torch.randn(4, (4 + 2 + 2) * 16), torch.zeros(16, 8)
    qkv_NE[1, 4 * 16 + 5] = odd
    q_NHD = cpu.rotary(qkv_NE, still_TR.cos(), still_TR.sin(), *paged[:3], pool, layout, 1)
    out_NHD = cpu.paged_attention(q_NHD, *paged[:3], pool, layout, 1)
    assert out_NHD[1:3, 0].isnan().all(), "the row itself, and the next one of its sequence"
    assert out_NHD[[0, 3]].isfinite().all()


@pytest.mark.parametrize("window", [0, 6])
def test_attention_is_that_over_the_rounded_pages(make_paged: Callable[..., Any], window: int) -> None:
    rows = [(0, position) for position in range(20, 30)] + [(1, 7), (2, 35)]
    paged = make_paged(rows, 4, kv_heads=2, head_dim=16)
    pool, layout = in_8_bits(paged.pool, paged.layout)
    q_NHD = torch.randn(len(rows), 6, 16)
    expected_NHD = attention.paged_attention(q_NHD, *paged[:3], *dequantized_pool(pool, layout), 1, window)
    if window:
        paged.tables_SP[0, :3] = -1
    out_NHD = cpu.paged_attention(q_NHD, *paged[:3], pool, layout, 1, window)
    torch.testing.assert_close(out_NHD, expected_NHD, atol=1e-5, rtol=1e-5)
