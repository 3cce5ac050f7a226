"""Paged attention: the compiled operation against its definition, and a row alone against a row among others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentrt_kernels import compiled
from agentrt_kernels.paged_attention import cpu, reference

ROWS = {
    1: [(0, 0)],
    3: [(0, 5), (1, 0), (1, 1)],
    7: [(2, 9), *((0, position) for position in range(3, 8)), (1, 0)],
    33: [*((1, position) for position in range(32)), (0, 40)],
    34: [(0, 200), *((1, position) for position in range(110, 143))],
}


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 8), (2, 32), (4, 64), (16, 32)])
@pytest.mark.parametrize("window", [0, 1, 5])
def test_paged_attention(make_paged: Callable[..., Any], rows: int, page_size: int, head_dim: int, window: int) -> None:
    paged = make_paged(ROWS[rows], page_size, kv_heads=2, head_dim=head_dim)
    q_NHD = torch.randn(rows, 6, head_dim)
    expected_NHD = reference.paged_attention(q_NHD, *paged, 1, window)
    torch.testing.assert_close(cpu.paged_attention(q_NHD, *paged, 1, window), expected_NHD, atol=1e-5, rtol=1e-5)
    # Pages of float16 are read as the numbers that they hold, nothing else is rounded.
    halved = paged._replace(pool=paged.pool.half())
    same = paged._replace(pool=halved.pool.float())
    out_NHD = cpu.paged_attention(q_NHD, *halved, 1, window)
    assert torch.equal(out_NHD, cpu.paged_attention(q_NHD, *same, 1, window))
    torch.testing.assert_close(out_NHD, reference.paged_attention(q_NHD, *halved, 1, window), atol=1e-5, rtol=1e-5)


def test_keys_that_are_the_values(make_paged: Callable[..., Any]) -> None:
    """Latent attention: as with values apart that are equal to the keys."""
    paged = make_paged(ROWS[34], 4, kv_heads=1, head_dim=24, parts=1)
    layout = paged.layout._replace(parts=2)
    twice = paged.pool.view(-1, 2, 1, 4 * 24).expand(-1, -1, 2, -1).flatten()
    q_NHD = torch.randn(34, 5, 24)
    expected_NHD = reference.paged_attention(q_NHD, *paged[:3], twice, layout, 1)
    for op in (reference.paged_attention, cpu.paged_attention):
        torch.testing.assert_close(op(q_NHD, *paged, 1), expected_NHD, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("op", [reference.paged_attention, cpu.paged_attention], ids=["reference", "cpu"])
def test_pages_before_the_window_are_not_looked_at(make_paged: Callable[..., Any], op: Callable[..., Any]) -> None:
    paged = make_paged([(0, 13), (0, 14), (1, 11)], 4, kv_heads=2, head_dim=8)
    q_NHD = torch.randn(3, 4, 8)
    expected_NHD = op(q_NHD, *paged, 1, 6)
    dropped = paged._replace(tables_SP=paged.tables_SP.clone(), pool=paged.pool.clone())
    for sequence, places in ((0, 2), (1, 1)):
        for place in range(places):
            start = int(paged.tables_SP[sequence, place]) * paged.layout.page_stride
            dropped.pool[start : start + paged.layout.page_stride] = torch.nan
            dropped.tables_SP[sequence, place] = -1
    assert torch.equal(op(q_NHD, *dropped, 1, 6), expected_NHD)


def test_the_reference_is_attention(make_paged: Callable[..., Any]) -> None:
    paged = make_paged([(0, position) for position in range(9)], 4, kv_heads=2, head_dim=8)
    q_NHD = torch.randn(9, 4, 8)
    pages = paged.pool.view(-1, *paged.layout[1:2], 2, 2, 4, 8)[paged.tables_SP[0].long(), 1]
    k_KTD, v_KTD = (pages[:, kind].transpose(0, 1).flatten(1, 2)[:, :9] for kind in (0, 1))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q_NHD.transpose(0, 1), k_KTD.repeat_interleave(2, 0), v_KTD.repeat_interleave(2, 0), is_causal=True
    )
    torch.testing.assert_close(
        reference.paged_attention(q_NHD, *paged, 1), expected.transpose(0, 1), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_rows_do_not_know_their_neighbours(make_paged: Callable[..., Any], page_size: int) -> None:
    rows = [(sequence, position) for sequence in range(3) for position in range(20, 31)]
    paged = make_paged(rows, page_size, kv_heads=2, head_dim=32)
    q_NHD = torch.randn(33, 6, 32)
    together_NHD = cpu.paged_attention(q_NHD, *paged, 0, 0)
    for order in (torch.arange(33).flip(0), torch.randperm(33), torch.tensor([4]), torch.arange(7, 14)):
        some = paged._replace(positions_N=paged.positions_N[order], table_of_N=paged.table_of_N[order])
        assert torch.equal(cpu.paged_attention(q_NHD[order], *some, 0, 0), together_NHD[order])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_siblings_change_nothing(make_paged: Callable[..., Any], page_size: int) -> None:
    """Rows over a tree of shared pages, against the same rows over copies of their own, and one by one."""
    rows = [(sequence, 150 + 3 * sequence) for sequence in range(12)]
    paged = make_paged(rows, page_size, kv_heads=2, head_dim=32)
    shared_SP = paged.tables_SP.clone()
    shared_SP[:, : 64 // page_size] = shared_SP[0, : 64 // page_size]
    for first in (0, 4, 8):
        shared_SP[first : first + 4, : 128 // page_size] = shared_SP[first, : 128 // page_size]
    pages_PE = paged.pool.view(-1, paged.layout.page_stride)
    pages_PE[paged.tables_SP.flatten().long()] = pages_PE[shared_SP.flatten().long()].clone()
    q_NHD = torch.randn(12, 6, 32)
    together_NHD = cpu.paged_attention(q_NHD, *paged._replace(tables_SP=shared_SP), 1, 0)
    assert torch.equal(together_NHD, cpu.paged_attention(q_NHD, *paged, 1, 0))
    for row in range(12):
        alone = (paged.positions_N[row : row + 1], paged.table_of_N[row : row + 1], shared_SP, *paged[3:])
        assert torch.equal(cpu.paged_attention(q_NHD[row : row + 1], *alone, 1, 0)[0], together_NHD[row])


def test_threads_change_nothing(make_paged: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    paged = make_paged([(0, position) for position in range(33)], 4, kv_heads=2, head_dim=32)
    q_NHD = torch.randn(33, 6, 32)
    alone_NHD = cpu.paged_attention(q_NHD, *paged, 0, 0)
    monkeypatch.setattr(compiled, "SPREAD_ABOVE_NANOSECONDS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert torch.equal(cpu.paged_attention(q_NHD, *paged, 0, 0), alone_NHD)


def test_what_float16_could_not_hold_shows_in_all_that_attend_it(make_paged: Callable[..., Any]) -> None:
    """Also where it is a key that would get no weight."""
    paged = make_paged([(0, 2), (0, 6), (1, 6)], 4, kv_heads=1, head_dim=8, dtype=torch.float16)
    start = int(paged.tables_SP[0, 0]) * paged.layout.page_stride + 3 * 8
    paged.pool[start] = torch.nan
    out_NHD = cpu.paged_attention(torch.randn(3, 4, 8), *paged, 0, 0)
    assert out_NHD.isnan().all(dim=2).all(dim=1).tolist() == [False, True, False]
    assert out_NHD[[0, 2]].isfinite().all()


def test_nan_stays_in_its_row(make_paged: Callable[..., Any]) -> None:
    paged = make_paged([(0, 9), (1, 9)], 4, kv_heads=2, head_dim=8)
    q_NHD = torch.randn(2, 4, 8)
    q_NHD[0] = torch.nan
    out_NHD = cpu.paged_attention(q_NHD, *paged, 0, 0)
    assert out_NHD[0].isnan().all()
    assert out_NHD[1].isfinite().all()
