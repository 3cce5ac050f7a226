"""Attention over pages by FlashInfer, where it is installed: its wrapper for rows over paged KV, planned once a step.

A page table is a request of FlashInfer's, and the rows of a step are the last of the text in it. Our pages need no copy:
the keys of a layer are a view with a page's stride between pages, and so are its values. Nothing of FlashInfer is imported
before `FlashInfer` is made.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt_kernels.pages import PageLayout

WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer's documentation advises."""


class FlashPlan(NamedTuple):
    """A step's attention, planned: a wrapper for each window, 0 being none."""

    wrappers: Mapping[int, Any]

    def attend(self, q_NHD: Tensor, pool: Tensor, layout: PageLayout, layer: int, window: int) -> Tensor:
        """As `paged_attention`, for the rows that were planned."""
        shape = (-1, layout.num_layers, layout.parts, layout.kv_heads, layout.page_size, layout.head_dim)
        of_layer_P2KTD = pool.view(shape)[:, layer]
        out_NHD: Tensor = self.wrappers[window].run(q_NHD, (of_layer_P2KTD[:, 0], of_layer_P2KTD[:, 1]))
        return out_NHD


class FlashInfer:
    """Plans steps on one device. A plan holds until the next one is made."""

    def __init__(self, device: torch.device) -> None:
        """`ImportError` if FlashInfer is not installed."""
        import flashinfer  # an extra

        self._wrapper, self._device = flashinfer.BatchPrefillWithPagedKVCacheWrapper, device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[int, Any] = {}

    def plan(
        self, positions_N: NDArray[np.int64], table_of_N: NDArray[np.int32], tables_GSP: NDArray[np.int32],
        windows: Sequence[int], layouts: Sequence[PageLayout], query_group: int, dtype: torch.dtype,
    ) -> FlashPlan:  # fmt: skip
        """The plan of a step's rows: those of one table are neighbours, at positions that follow one another.

        There is a window and a layout for each cache group, and `query_group` query heads for each KV head.
        """
        starts_R = np.flatnonzero(np.diff(table_of_N, prepend=-1))
        ends_R = np.append(starts_R[1:], len(table_of_N))
        for window, layout, tables_SP in zip(windows, layouts, tables_GSP, strict=True):
            tables_RP = tables_SP[table_of_N[starts_R]]
            first_R, last_R = positions_N[starts_R], positions_N[ends_R - 1]
            # Pages before the first row's window are left out: what a row attends is counted from the end.
            from_R = np.maximum(first_R - window + 1, 0) // layout.page_size if window else np.zeros_like(first_R)
            stop_R = last_R // layout.page_size + 1
            places_P = np.arange(tables_RP.shape[1])
            pages = tables_RP[(places_P >= from_R[:, None]) & (places_P < stop_R[:, None])]
            if window not in self._wrappers:
                self._wrappers[window] = self._wrapper(self._workspace, "HND")
            self._wrappers[window].plan(
                _ints(np.append(starts_R, len(table_of_N))), _ints(np.append(0, np.cumsum(stop_R - from_R))),
                _ints(pages).to(self._device, non_blocking=True), _ints(last_R % layout.page_size + 1),
                layout.kv_heads * query_group, layout.kv_heads, layout.head_dim, layout.page_size, causal=True,
                window_left=window - 1, q_data_type=dtype, kv_data_type=dtype,
            )  # fmt: skip
        return FlashPlan(self._wrappers)


def _ints(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
