"""Rotary positions and the write of KV: the compiled operation against its definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentrt_kernels.rotary import cpu, reference

ROWS = {
    1: [(0, 0)],
    3: [(0, 5), (1, 0), (1, 1)],
    7: [(2, 9), *((0, position) for position in range(3, 8)), (1, 0)],
    33: [*((1, position) for position in range(32)), (0, 40)],
}


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 8), (2, 32), (4, 64), (16, 32)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 1e-3)], ids=["fp32", "fp16"])
def test_rotary(
    make_paged: Callable[..., Any], rows: int, page_size: int, head_dim: int, normed: bool, dtype: torch.dtype, error: float
) -> None:  # fmt: skip
    paged = make_paged(ROWS[rows], page_size, kv_heads=2, head_dim=head_dim, dtype=dtype)
    qkv_NE = torch.randn(rows, (6 + 2 + 2) * head_dim)
    angles_TR = torch.arange(64).unsqueeze(1) * torch.rand(head_dim // 2)
    norms = (torch.randn(head_dim), torch.randn(head_dim), 1e-6) if normed else None
    pools = [paged.pool.clone(), paged.pool.clone()]
    expected_NHD, out_NHD = (
        op(qkv_NE.clone(), angles_TR.cos(), angles_TR.sin(), *paged[:3], pool, paged.layout, 1, norms)
        for op, pool in zip((reference.rotary, cpu.rotary), pools, strict=True)
    )
    torch.testing.assert_close(out_NHD, expected_NHD, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pools[1], pools[0], atol=error, rtol=error)
    changed = (pools[1] != paged.pool).sum().item()
    assert changed <= rows * 2 * 2 * head_dim, "it wrote beyond the rows' own places"


def test_rows_of_a_wider_product_are_normed_too(make_paged: Callable[..., Any]) -> None:
    """A product's result is as wide as its panels: of a view of it a copy was normed, and the view was turned."""
    paged = make_paged(ROWS[3], 4, kv_heads=1, head_dim=8)
    wide_NE, angles_TR = torch.randn(3, 48), torch.arange(16).unsqueeze(1) * torch.rand(4)
    norms, pools = (torch.randn(8), torch.randn(8), 1e-6), [paged.pool.clone(), paged.pool.clone()]
    expected_NHD, out_NHD = (
        op(qkv_NE, angles_TR.cos(), angles_TR.sin(), *paged[:3], pool, paged.layout, 1, norms)
        for op, qkv_NE, pool in zip(
            (reference.rotary, cpu.rotary), (wide_NE[:, :40].contiguous(), wide_NE[:, :40]), pools, strict=True
        )
    )
    torch.testing.assert_close(out_NHD, expected_NHD, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pools[1], pools[0], atol=1e-5, rtol=1e-5)


def test_few_dimensions_turn_and_there_are_no_values(make_paged: Callable[..., Any]) -> None:
    paged = make_paged(ROWS[7], 4, kv_heads=1, head_dim=24, parts=1)
    qk_NE, angles_TR = torch.randn(7, (3 + 1) * 24), torch.arange(16).unsqueeze(1) * torch.rand(4)
    pools = [paged.pool.clone(), paged.pool.clone()]
    expected_NHD, out_NHD = (
        op(qk_NE.clone(), angles_TR.cos(), angles_TR.sin(), *paged[:3], pool, paged.layout, 1)
        for op, pool in zip((reference.rotary, cpu.rotary), pools, strict=True)
    )
    torch.testing.assert_close(out_NHD, expected_NHD, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pools[1], pools[0], atol=1e-5, rtol=1e-5)
    assert (pools[1] != paged.pool).sum() == 7 * 24


@pytest.mark.parametrize("op", [reference.rotary, cpu.rotary], ids=["reference", "cpu"])
def test_float16_rounds_to_even_and_shows_what_it_cannot_hold(
    make_paged: Callable[..., Any], op: Callable[..., Any]
) -> None:
    paged = make_paged([(0, 0)], 1, kv_heads=1, head_dim=8, layers=1, dtype=torch.float16)
    values = [65504.0, 65519.99, 65520.0, -65520.0, torch.inf, 1 + 2**-11, 1 + 3 * 2**-11, 2**-25]
    qkv_NE, still_TR = torch.tensor([[1.0] * 8 + [-7e4] * 8 + values]), torch.zeros(1, 4)
    q_NHD = op(qkv_NE, still_TR.cos(), still_TR.sin(), *paged, 0)
    assert q_NHD.flatten().tolist() == [1.0] * 8
    assert paged.pool[:8].isnan().all()
    assert paged.pool[10:13].isnan().all()
    assert paged.pool[[8, 9, 13, 14, 15]].tolist() == [65504.0, 65504.0, 1.0, 1 + 2**-9, 0.0]
