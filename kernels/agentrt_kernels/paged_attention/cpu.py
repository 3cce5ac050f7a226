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
    h // (H // kv_heads). Pages wholly before the window are not looked at: their entries may be -1.
    """
    out_NHD = q_NHD.new_empty(q_NHD.shape)
    positions = array(positions_N)
    multiplications = 2 * q_NHD.shape[1] * q_NHD.shape[2] * int(positions.sum())
    spread(
        _attend, q_NHD.shape[0] * layout.kv_heads, 0.1 * multiplications,
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
    weights = np.empty(page_size, dtype=np.float32)
    peak_G = np.full(group, -np.inf, dtype=np.float32)
    total_G = np.zeros(group, dtype=np.float32)
    out_GD[:] = np.float32(0.0)
    first = max(0, position - window + 1) if window > 0 else 0
    for page in range(first // page_size, position // page_size + 1):
        start = max(first - page * page_size, 0)
        stop = min(position + 1 - page * page_size, page_size)
        base = np.int64(table_P[page]) * page_stride
        k_TD = pool[base + k_offset + start * size : base + k_offset + stop * size]
        v_TD = pool[base + v_offset + start * size : base + v_offset + stop * size]
        weights_T = weights[: stop - start]
        for g in range(group):
            _score(q_GD[g], k_TD, scale, weights_T)
            _weigh(weights_T, peak_G, total_G, g, out_GD[g])
            _mix(weights_T, v_TD, out_GD[g])
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


# Two loops over a page (flat here). Four tokens a round share the loads of q and out, which is three times as fast;
# unsigned indices spare a test for negative ones, which would keep the loops from becoming vector code.


@reducing()
def _score(q_D: Any, k_TD: Any, scale: Any, scores_T: Any) -> None:
    size, tokens = np.uint64(q_D.shape[0]), np.uint64(scores_T.shape[0])
    rounds = tokens // np.uint64(4) * np.uint64(4)
    for t in range(np.uint64(0), rounds, np.uint64(4)):
        a = b = c = e = np.float32(0.0)
        k0 = t * size
        k1, k2, k3 = k0 + size, k0 + size + size, k0 + size + size + size
        for d in range(size):
            a += q_D[d] * k_TD[k0 + d]
            b += q_D[d] * k_TD[k1 + d]
            c += q_D[d] * k_TD[k2 + d]
            e += q_D[d] * k_TD[k3 + d]
        scores_T[t], scores_T[t + np.uint64(1)] = a * scale, b * scale
        scores_T[t + np.uint64(2)], scores_T[t + np.uint64(3)] = c * scale, e * scale
    for t in range(rounds, tokens, np.uint64(1)):
        a = np.float32(0.0)
        for d in range(size):
            a += q_D[d] * k_TD[t * size + d]
        scores_T[t] = a * scale


@ordered()
def _mix(weights_T: Any, v_TD: Any, out_D: Any) -> None:
    size, tokens = np.uint64(out_D.shape[0]), np.uint64(weights_T.shape[0])
    rounds = tokens // np.uint64(4) * np.uint64(4)
    for t in range(np.uint64(0), rounds, np.uint64(4)):
        a, b = weights_T[t], weights_T[t + np.uint64(1)]
        c, e = weights_T[t + np.uint64(2)], weights_T[t + np.uint64(3)]
        v0 = t * size
        v1, v2, v3 = v0 + size, v0 + size + size, v0 + size + size + size
        for d in range(size):
            out_D[d] = out_D[d] + a * v_TD[v0 + d] + b * v_TD[v1 + d] + c * v_TD[v2 + d] + e * v_TD[v3 + d]
    for t in range(rounds, tokens, np.uint64(1)):
        for d in range(size):
            out_D[d] += weights_T[t] * v_TD[t * size + d]
