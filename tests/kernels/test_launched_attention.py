"""Paged attention's Triton kernels and their plan, against the definition."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt_kernels.paged_attention import launch, plan, reference
from agentrt_kernels.quantized.reference import LARGEST, SCALE_SIZE, dequantized_pool, quantize_rows

# The interpreter computes with numpy; the logarithm of an empty part's sum is the -inf that is meant.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")

DECODES = [(sequence, position) for sequence, position in enumerate((0, 40, 16, 33))]
CHUNKS = [*((0, position) for position in range(30, 37)), (1, 19), *((2, position) for position in range(5))]


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts so close that short contexts have several parts."""
    monkeypatch.setattr(plan, "DECODE_KEYS", 16)
    monkeypatch.setattr(plan, "CHUNK_KEYS", 16)
    monkeypatch.setattr(launch, "BLOCK_T", 16)


def on(device: str, paged: Any) -> Any:
    return paged._replace(**{name: value.to(device) for name, value in paged._asdict().items() if name != "layout"})


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize(
    ("rows", "page_size", "head_dim", "group", "window"),
    [(DECODES, 1, 8, 3, 0), (DECODES, 16, 64, 7, 18), (CHUNKS, 4, 80, 1, 0), (CHUNKS, 16, 16, 2, 1)],
)
def test_paged_attention(
    make_paged: Callable[..., Any], device: str, rows: list[tuple[int, int]], page_size: int, head_dim: int,
    group: int, window: int,
) -> None:  # fmt: skip
    paged = on(device, make_paged(rows, page_size, kv_heads=2, head_dim=head_dim))
    q_NHD = torch.randn(len(rows), 2 * group, head_dim, device=device)
    expected_NHD = reference.paged_attention(q_NHD, *paged, 1, window)
    torch.testing.assert_close(launch.paged_attention(q_NHD, *paged, 1, window), expected_NHD, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("short_parts")
def test_scores_with_a_cap(make_paged: Callable[..., Any], device: str) -> None:
    """Scores far beyond it, in several parts, some before a window."""
    paged = on(device, make_paged(DECODES, 4, kv_heads=2, head_dim=16))
    q_NHD = 20 * torch.randn(len(DECODES), 4, 16, device=device)
    expected_NHD = reference.paged_attention(q_NHD, *paged, 1, 18, cap=3.0)
    assert (expected_NHD - reference.paged_attention(q_NHD, *paged, 1, 18)).abs().max() > 0.5
    found_NHD = launch.paged_attention(q_NHD, *paged, 1, 18, cap=3.0)
    torch.testing.assert_close(found_NHD, expected_NHD, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize(("rows", "page_size", "head_dim", "heads"), [(DECODES, 4, 24, 5), (CHUNKS, 16, 40, 12)])
def test_keys_that_are_the_values(
    make_paged: Callable[..., Any], device: str, rows: list[tuple[int, int]], page_size: int, head_dim: int, heads: int
) -> None:
    """Latent attention: one wide head of keys, in tiles of 32 lanes, or fewer."""
    paged = on(device, make_paged(rows, page_size, kv_heads=1, head_dim=head_dim, parts=1))
    q_NHD = torch.randn(len(rows), heads, head_dim, device=device)
    expected_NHD = reference.paged_attention(q_NHD, *paged, 1)
    torch.testing.assert_close(launch.paged_attention(q_NHD, *paged, 1), expected_NHD, atol=1e-5, rtol=1e-5)


def test_many_rows_in_one_tile_and_in_several(make_paged: Callable[..., Any], device: str) -> None:
    rows = [*((0, position) for position in range(3, 20)), *((1, position) for position in range(70, 73))]
    paged = on(device, make_paged(rows, 4, kv_heads=1, head_dim=16))
    q_NHD = torch.randn(20, 8, 16, device=device)
    expected_NHD = reference.paged_attention(q_NHD, *paged, 0)
    torch.testing.assert_close(launch.paged_attention(q_NHD, *paged, 0), expected_NHD, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("short_parts")
def test_a_prefix_is_read_once_for_its_group(make_paged: Callable[..., Any], device: str) -> None:
    paged = make_paged([(sequence, 40) for sequence in range(4)], 4, kv_heads=2, head_dim=16)
    paged.tables_SP[1:, :8] = paged.tables_SP[0, :8]  # the first 32 ids are common to all
    paged.tables_SP[2, :4] = paged.tables_SP[3, 4:8] = torch.tensor([20, 21, 22, 23], dtype=torch.int32)
    made = plan.plan_attention(*(tensor.numpy() for tensor in paged[:3]), 4, launch.tile_rows(2))
    assert [tuple(item[:4]) for item in made.items_I5.tolist()] == [
        (0, 2, 0, 16), (2, 1, 0, 16), (3, 1, 0, 16),
        (0, 3, 16, 32), (3, 1, 16, 32),
        *((row, 1, 32, 41) for row in range(4)),
    ]  # fmt: skip
    paged = on(device, paged)
    q_NHD = torch.randn(4, 4, 16, device=device)
    expected_NHD = reference.paged_attention(q_NHD, *paged, 1)
    torch.testing.assert_close(launch.paged_attention(q_NHD, *paged, 1), expected_NHD, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("short_parts")
def test_pages_before_the_window_are_not_looked_at(make_paged: Callable[..., Any], device: str) -> None:
    paged = on(device, make_paged([(0, 33), (0, 34), (1, 31)], 4, kv_heads=2, head_dim=8))
    q_NHD = torch.randn(3, 4, 8, device=device)
    expected_NHD = launch.paged_attention(q_NHD, *paged, 1, 6)
    dropped = paged._replace(tables_SP=paged.tables_SP.clone(), pool=paged.pool.clone())
    for sequence, places in ((0, 7), (1, 6)):
        for place in range(places):
            start = int(paged.tables_SP[sequence, place]) * paged.layout.page_stride
            dropped.pool[start : start + paged.layout.page_stride] = torch.nan
            dropped.tables_SP[sequence, place] = -1
    assert torch.equal(launch.paged_attention(q_NHD, *dropped, 1, 6), expected_NHD)


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_pages_in_8_bits(make_paged: Callable[..., Any], device: str, dtype: torch.dtype) -> None:
    paged = make_paged(CHUNKS, 4, kv_heads=2, head_dim=16)
    layout = paged.layout._replace(scale_size=SCALE_SIZE)
    q_XD, scales_X = quantize_rows(paged.pool.view(-1, 16), dtype)
    blocks = (q_XD.view(torch.uint8).view(-1, 2 * 4 * 16), scales_X.view(torch.uint8).view(-1, 2 * 4 * SCALE_SIZE))
    pool = torch.cat(blocks, dim=1).flatten().view(dtype)
    assert LARGEST[dtype] > 0
    plain, plain_layout = dequantized_pool(pool, layout)
    assert (plain - paged.pool).abs().max() < 0.15
    q_NHD = torch.randn(len(CHUNKS), 6, 16, device=device)
    paged = on(device, paged)
    expected_NHD = reference.paged_attention(q_NHD, *paged[:3], plain.to(device), plain_layout, 1)
    out_NHD = launch.paged_attention(q_NHD, *paged[:3], pool.to(device), layout, 1)
    torch.testing.assert_close(out_NHD, expected_NHD, atol=1e-5, rtol=1e-5)


ROW_COUNTS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 70), st.integers(0, 2)), min_size=1, max_size=6)


@given(sequences=ROW_COUNTS, tile_rows=st.integers(1, 4))
@settings(max_examples=60)
def test_a_plan_has_every_key_of_every_row_once(sequences: list[tuple[int, int, int]], tile_rows: int) -> None:
    """Sequences of (rows, first position, which prompt's pages they have)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "DECODE_KEYS", 8)
        patch.setattr(plan, "CHUNK_KEYS", 16)
        counts = [count for count, _, _ in sequences]
        positions_N = np.concatenate([np.arange(start, start + count) for count, start, _ in sequences])
        table_of_N = np.repeat(np.arange(len(sequences), dtype=np.int32), counts)
        tables_SP = np.array([np.arange(40) + 100 * prompt for _, _, prompt in sequences], dtype=np.int32)
        made = plan.plan_attention(positions_N, table_of_N, tables_SP, 2, tile_rows)
    keys: dict[int, list[range]] = {row: [] for row in range(len(positions_N))}
    slots: dict[int, list[int]] = {row: [] for row in keys}
    for first, rows, start, stop, slot in made.items_I5.tolist():
        assert rows <= tile_rows
        for row in range(first, first + rows):
            pages_2P = tables_SP[table_of_N[[first, row]], start // 2 : -(-stop // 2)]
            assert (pages_2P[0] == pages_2P[1]).all()
            keys[row].append(range(start, stop))
            slots[row] += [slot + row - first] if slot >= 0 else []
    for row, ranges in keys.items():
        covered = [key for some in ranges for key in some]
        assert len(set(covered)) == len(covered)
        assert set(range(positions_N[row] + 1)) <= set(covered)
        assert [slot for slot in made.slots_NC[row].tolist() if slot >= 0] == slots[row]
        assert slots[row] or len(ranges) == 1
    used = sorted(slot for some in slots.values() for slot in some)
    assert used == list(range(made.num_slots))


def test_a_page_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="page_size must divide 512, but it is 3"):
        plan.plan_attention(np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros((1, 1), np.int32), 3, 1)
