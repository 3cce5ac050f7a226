"""Attention over keys and values in pages, compiled.

A task is one row and one KV head. It walks the row's pages in the order of positions with a running softmax, so its
bits depend on its own position, keys and values alone.
"""

from typing import Any

import numpy as np
from torch import Tensor

from agentrt_kernels.compiled import array, exp32, ordered, reducing, spread
from agentrt_kernels.pages import PageLayout


def paged_attention(
    q_NHD: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_SP: Tensor,
    pool: Tensor, layout: PageLayout, layer: int, window: int = 0,
) -> Tensor:  # fmt: skip
    """Each row attends the keys 0..i of its sequence, i its position (the last `window` of them, if not 0); `out_NHD`.

    The keys and values are in the pages already, those of the rows themselves too. Query head h uses KV head
    h // (H // kv_heads).
    """
    out_NHD = q_NHD.new_empty(q_NHD.shape)
    positions = array(positions_N)
    multiplications = 2 * q_NHD.shape[1] * q_NHD.shape[2] * int(positions.sum())
    spread(
        _attend, q_NHD.shape[0] * layout.kv_heads, 0.2 * multiplications,
        array(q_NHD), positions, array(table_of_N), array(tables_SP), array(pool), layout.page_size,
        layout.page_stride, layer * layout.layer_stride, layout.kv_stride, layout.kv_heads, window, array(out_NHD),
    )  # fmt: skip
    return out_NHD


@ordered()
def _attend(
    begin: int, end: int, q_NHD: Any, positions_N: Any, table_of_N: Any, tables_SP: Any, pool: Any, page_size: int,
    page_stride: int, layer_offset: int, kv_stride: int, kv_heads: int, window: int, out_NHD: Any,
) -> None:  # fmt: skip
    rows, heads, size = q_NHD.shape
    group = heads // kv_heads
    for task in range(begin, end):
        turn, k = task // kv_heads, task % kv_heads
        # From both ends in turn: a prompt chunk's later rows cost more, and each thread takes one stretch of tasks.
        n = turn // 2 if turn % 2 == 0 else rows - 1 - turn // 2
        k_offset = layer_offset + k * page_size * size
        _attend_row(
            q_NHD[n, k * group : (k + 1) * group], positions_N[n], tables_SP[table_of_N[n]], pool, page_size,
            page_stride, k_offset, k_offset + kv_stride, window, out_NHD[n, k * group : (k + 1) * group],
        )  # fmt: skip


@ordered()
def _attend_row(
    q_GD: Any, position: int, table_P: Any, pool: Any, page_size: int, page_stride: int,
    k_offset: int, v_offset: int, window: int, out_GD: Any,
) -> None:  # fmt: skip
    group, size = q_GD.shape
    scale = np.float32(1.0 / np.sqrt(size))
    weights_GT = np.empty((group, page_size), dtype=np.float32)
    peak_G = np.full(group, -np.inf, dtype=np.float32)
    total_G = np.zeros(group, dtype=np.float32)
    out_GD[:] = np.float32(0.0)
    first = max(0, position - window + 1) if window > 0 else 0
    for page in range(first // page_size, position // page_size + 1):
        start = max(first - page * page_size, 0)
        stop = min(position + 1 - page * page_size, page_size)
        base = np.int64(table_P[page]) * page_stride
        for t in range(start, stop):
            place = base + k_offset + t * size
            k_D = pool[place : place + size]
            for g in range(group):
                weights_GT[g, t] = _dot(q_GD[g], k_D) * scale
        for g in range(group):
            _weigh(weights_GT[g, start:stop], peak_G, total_G, g, out_GD[g])
        for t in range(start, stop):
            place = base + v_offset + t * size
            v_D = pool[place : place + size]
            for g in range(group):
                _add(weights_GT[g, t], v_D, out_GD[g])
    for g in range(group):
        for d in range(size):
            out_GD[g, d] /= total_G[g]


@ordered()
def _weigh(scores_T: Any, peak_G: Any, total_G: Any, g: int, out_D: Any) -> None:
    """Turn one page's scores into weights, and bring what was summed before to the new peak."""
    peak = peak_G[g]
    for t in range(scores_T.shape[0]):
        peak = max(peak, scores_T[t])
    if peak > peak_G[g]:
        shrink = exp32(peak_G[g] - peak)
        peak_G[g] = peak
        total_G[g] *= shrink
        for d in range(out_D.shape[0]):
            out_D[d] *= shrink
    for t in range(scores_T.shape[0]):
        scores_T[t] = exp32(scores_T[t] - peak)
    for t in range(scores_T.shape[0]):
        total_G[g] += scores_T[t]


@reducing()
def _dot(a_D: Any, b_D: Any) -> Any:
    total = np.float32(0.0)
    for d in range(a_D.shape[0]):
        total += a_D[d] * b_D[d]
    return total


@ordered()
def _add(weight: Any, v_D: Any, out_D: Any) -> None:
    for d in range(v_D.shape[0]):
        out_D[d] += weight * v_D[d]
