"""Rotary positions and the write of KV: the Triton kernel against the definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentrt_kernels.quantized.reference import SCALE_SIZE, dequantized_pool, quantize_rows
from agentrt_kernels.rotary import launch, reference

ROWS = [(2, 9), (0, 3), (0, 4), (1, 0)]


@pytest.mark.parametrize(("page_size", "head_dim", "normed"), [(1, 8, False), (4, 80, True), (16, 32, True)])
def test_rotary(make_paged: Callable[..., Any], device: str, page_size: int, head_dim: int, normed: bool) -> None:
    paged = make_paged(ROWS, page_size, kv_heads=2, head_dim=head_dim)
    qkv_NE = torch.randn(4, (3 + 2 + 2) * head_dim)
    angles_TR = torch.arange(16).unsqueeze(1) * torch.rand(head_dim // 2)
    norms = (torch.randn(head_dim), torch.randn(head_dim), 1e-6) if normed else None
    pool = paged.pool.clone()
    tensors = (qkv_NE, angles_TR.cos(), angles_TR.sin(), *paged[:3])
    expected_NHD = reference.rotary(*tensors, pool, paged.layout, 1, norms)
    on_device = [tensor.to(device) for tensor in tensors]
    norms_there = (norms[0].to(device), norms[1].to(device), norms[2]) if norms else None
    written = paged.pool.to(device, copy=True)
    out_NHD = launch.rotary(*on_device, written, paged.layout, 1, norms_there)
    torch.testing.assert_close(out_NHD.cpu(), expected_NHD, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(written.cpu(), pool, atol=1e-5, rtol=1e-5)
    assert torch.equal(written.cpu() == paged.pool, pool == paged.pool), "it wrote beyond the rows' own places"


def test_few_dimensions_turn_and_there_are_no_values(make_paged: Callable[..., Any], device: str) -> None:
    paged = make_paged(ROWS, 4, kv_heads=1, head_dim=24, parts=1)
    qk_NE, angles_TR = torch.randn(4, (3 + 1) * 24), torch.arange(16).unsqueeze(1) * torch.rand(4)
    pool = paged.pool.clone()
    tensors = (qk_NE, angles_TR.cos(), angles_TR.sin(), *paged[:3])
    expected_NHD = reference.rotary(*tensors, pool, paged.layout, 1)
    halves_N32h = expected_NHD.view(4, 3, 2, 12)
    assert torch.equal(halves_N32h[..., 4:], qk_NE.view(4, 4, 2, 12)[:, :3, :, 4:])
    written = paged.pool.to(device, copy=True)
    out_NHD = launch.rotary(*(tensor.to(device) for tensor in tensors), written, paged.layout, 1)
    torch.testing.assert_close(out_NHD.cpu(), expected_NHD, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(written.cpu(), pool, atol=1e-5, rtol=1e-5)
    assert (written.cpu() != paged.pool).sum() == 4 * 24


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_rotary_into_pages_in_8_bits(make_paged: Callable[..., Any], device: str, dtype: torch.dtype) -> None:
    """Angles of 0 turn nothing, so what is written is the rows' own keys and values, rounded as the definition rounds."""
    paged = make_paged(ROWS, 4, kv_heads=2, head_dim=16)
    layout = paged.layout._replace(scale_size=SCALE_SIZE)
    pages = paged.pool.numel() // paged.layout.page_stride
    pool = torch.zeros(pages * layout.page_stride, dtype=torch.uint8, device=device).view(dtype)
    qkv_NE, angles_TR = torch.randn(4, (1 + 2 + 2) * 16, device=device), torch.zeros(16, 8, device=device)
    places = [tensor.to(device) for tensor in paged[:3]]
    launch.rotary(qkv_NE, angles_TR.cos(), angles_TR.sin(), *places, pool, layout, 1)
    plain, _ = dequantized_pool(pool.cpu(), layout)
    view = plain.view(-1, 2, 2, 2, 4, 16)
    for row, (sequence, position) in enumerate(ROWS):
        page = paged.tables_SP[sequence, position // 4]
        q_XD, scales_X = quantize_rows(qkv_NE[row].cpu().view(-1, 16)[1:], dtype)
        expected_2KD = (q_XD.float() * scales_X.unsqueeze(1)).view(2, 2, 16)
        assert torch.equal(view[page, 1, :, :, position % 4], expected_2KD)


def test_what_no_8_bits_hold_shows(make_paged: Callable[..., Any], device: str) -> None:
    paged = make_paged(ROWS, 4, kv_heads=2, head_dim=16)
    layout = paged.layout._replace(scale_size=SCALE_SIZE)
    pages = paged.pool.numel() // paged.layout.page_stride
    pool = torch.zeros(pages * layout.page_stride, dtype=torch.int8, device=device)
    qkv_NE, angles_TR = torch.randn(4, (1 + 2 + 2) * 16, device=device), torch.zeros(16, 8, device=device)
    qkv_NE[1, 16 + 3], qkv_NE[2, 48 + 9] = torch.nan, torch.inf
    places = [tensor.to(device) for tensor in paged[:3]]
    launch.rotary(qkv_NE, angles_TR.cos(), angles_TR.sin(), *places, pool, layout, 1)
    view = dequantized_pool(pool.cpu(), layout)[0].view(-1, 2, 2, 2, 4, 16)
    odd = []
    for sequence, position in ROWS:
        kv_2KD = view[paged.tables_SP[sequence, position // 4], 1, :, :, position % 4]
        odd.append(kv_2KD.isnan().all(dim=-1).flatten().tolist())
        assert kv_2KD.isnan().any(dim=-1).equal(kv_2KD.isnan().all(dim=-1))
    assert odd == [[False] * 4, [True, False, False, False], [False, False, True, False], [False] * 4]
