"""The adapter to FlashInfer, beside a stand-in that computes what its documentation says of plan and run."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrt_kernels.paged_attention import reference
from agentrt_kernels.paged_attention.flashinfer import FlashInfer

ROWS = [(0, 40), *((1, position) for position in range(7, 30)), (2, 0), (3, 18), (3, 19)]


class Wrapper:
    """Attention of rows that are the last of their texts, whose keys are in the pages that `plan` names."""

    made: list["Wrapper"] = []

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert (workspace.dtype, workspace.numel(), kv_layout) == (torch.uint8, 128 * 2**20, "HND")
        self.plans: list[dict[str, Any]] = []
        self.made.append(self)

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, **more: Any,
    ) -> None:  # fmt: skip
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(array.dtype == torch.int32 and array.is_contiguous() for array in arrays)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        assert (paged_kv_indices >= 0).all()
        self.arrays, self.heads, self.page_size = [array.tolist() for array in arrays], num_qo_heads, page_size
        self.window_left = more["window_left"]
        self.plans.append(more | {"heads": (num_qo_heads, num_kv_heads, head_dim_qk, page_size)})

    def run(self, q_NHD: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        rows, places, pages, last = self.arrays
        out_NHD = torch.empty_like(q_NHD)
        for request in range(len(last)):
            own = pages[places[request] : places[request + 1]]
            keys = (len(own) - 1) * self.page_size + last[request]
            k_TKD, v_TKD = (cache[own].transpose(1, 2).flatten(0, 1)[:keys] for cache in paged_kv_cache)
            for row in range(rows[request], rows[request + 1]):
                stop = keys - (rows[request + 1] - 1 - row)
                start = max(0, stop - 1 - self.window_left) if self.window_left >= 0 else 0
                k_HTD, v_HTD = (
                    one[start:stop].transpose(0, 1).repeat_interleave(self.heads // one.shape[1], dim=0)
                    for one in (k_TKD, v_TKD)
                )
                scores_HT = torch.einsum("hd,htd->ht", q_NHD[row], k_HTD) * q_NHD.shape[2] ** -0.5
                out_NHD[row] = torch.einsum("ht,htd->hd", scores_HT.softmax(1), v_HTD)
        return out_NHD


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Wrapper]:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(Wrapper, "made", made := [])
    return made


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_attention_of_a_step_in_two_cache_groups(
    page_size: int, make_paged: Callable[..., Any], stand_in: list[Wrapper]
) -> None:
    """All keys, and the last 6 of them with what lies before them gone from the table; planned twice, used for two layers."""
    paged, window = make_paged(ROWS, page_size, kv_heads=2, head_dim=16), 6
    windowed_SP = paged.tables_SP.clone()
    for sequence, first in ((0, 40), (1, 7), (3, 18)):
        windowed_SP[sequence, : max(0, first - window + 1) // page_size] = -1
    tables_GSP, q_NHD = torch.stack([paged.tables_SP, windowed_SP]), torch.randn(len(ROWS), 6, 16)
    flash = FlashInfer(torch.device("cpu"))
    positions, table_of, tables = (one.numpy() for one in (paged.positions_N, paged.table_of_N, tables_GSP))
    flash.plan(np.array([29]), np.array([1], dtype=np.int32), tables, (0, window), (paged.layout,) * 2, 3, q_NHD.dtype)
    plan = flash.plan(positions, table_of, tables, (0, window), (paged.layout,) * 2, 3, q_NHD.dtype)
    for layer in (0, 1):
        for size, tables_SP in zip((0, window), tables_GSP, strict=True):
            found_NHD = plan.attend(q_NHD, paged.pool, paged.layout, layer, size)
            expected_NHD = reference.paged_attention(
                q_NHD, paged.positions_N, paged.table_of_N, tables_SP, paged.pool, paged.layout, layer, size
            )
            torch.testing.assert_close(found_NHD, expected_NHD, atol=1e-5, rtol=1e-5)
    kinds = {
        "causal": True,
        "q_data_type": torch.float32,
        "kv_data_type": torch.float32,
        "heads": (6, 2, 16, page_size),
    }
    assert [one.plans for one in stand_in] == [[kinds | {"window_left": -1}] * 2, [kinds | {"window_left": 5}] * 2]


def test_it_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match="flashinfer"):
        FlashInfer(torch.device("cpu"))
