"""Attention over keys and values in pages, compiled.

A row takes its keys block by block, a block being `KEYS` positions from a multiple of `KEYS` on, with a running softmax:
score the block's keys, turn the scores into weights, mix the values. So its bits depend on its own position, keys and
values alone.

A task is one KV head and a few neighbouring rows, which walk their blocks together. Where their tables name the same
pages (the rows of a prompt chunk, siblings over a shared prefix, however their tree branches) these are read from memory
once for all. Sharing is nothing but an order of the same operations: there are no partial results to merge, and a row has
the same bits with and without siblings. It pays where rows that share pages are neighbours; the caller sees to that.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrt_kernels.compiled import array, exp32, ordered, ordered_bits, reducing, spread
from agentrt_kernels.pages import PageLayout

KEYS = 64
"""Keys of a block, K and V of which fit the first-level cache twice over; one page if that is larger."""
ROWS = 8
"""Rows of a task at most: their queries and sums stay in the second-level cache."""


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
    rows = max(1, min(ROWS, q_NHD.shape[0] * layout.kv_heads // (4 * torch.get_num_threads())))
    spread(
        _attend, -(-q_NHD.shape[0] // rows) * layout.kv_heads, 0.04 * multiplications,
        rows, array(q_NHD), positions, array(table_of_N), array(tables_SP), array(pool), layout.page_size,
        layout.page_stride, layer * layout.layer_stride, layout.kv_stride, layout.kv_heads, window, array(out_NHD),
    )  # fmt: skip
    return out_NHD


@ordered()
def _attend(
    begin: int, end: int, rows: int, q_NHD: Any, positions_N: Any, table_of_N: Any, tables_SP: Any, pool: Any,
    page_size: int, page_stride: int, layer_offset: int, kv_stride: int, kv_heads: int, window: int, out_NHD: Any,
) -> None:  # fmt: skip
    count, heads, size = q_NHD.shape
    group = heads // kv_heads
    block_pages = max(1, KEYS // page_size)
    scores_T = np.empty(block_pages * page_size, dtype=np.float32)
    peak_RG, total_RG = np.empty((rows, group), dtype=np.float32), np.empty((rows, group), dtype=np.float32)
    blocks = (count + rows - 1) // rows
    for task in range(begin, end):
        turn, k = task // kv_heads, task % kv_heads
        # From both ends in turn: a prompt chunk's later rows cost more, and each thread takes one stretch of tasks.
        block = turn // 2 if turn % 2 == 0 else blocks - 1 - turn // 2
        start, stop = block * rows, min((block + 1) * rows, count)
        k_offset = layer_offset + k * page_size * size
        first_page, last_page = 0, positions_N[start:stop].max() // page_size
        if window > 0:
            first_page = max(0, positions_N[start:stop].min() - window + 1) // page_size
        peak_RG[:], total_RG[:] = np.float32(-np.inf), np.float32(0.0)
        out_NHD[start:stop, k * group : (k + 1) * group] = np.float32(0.0)
        for page in range(first_page // block_pages * block_pages, last_page + 1, block_pages):
            for n in range(start, stop):
                first = max(0, positions_N[n] - window + 1) if window > 0 else 0
                first, last = max(first, page * page_size), min(positions_N[n] + 1, (page + block_pages) * page_size)
                if first < last:
                    _attend_block(
                        q_NHD[n, k * group : (k + 1) * group], tables_SP[table_of_N[n]], first, last, pool, page_size,
                        page_stride, k_offset, k_offset + kv_stride, scores_T[: last - first], peak_RG[n - start],
                        total_RG[n - start], out_NHD[n, k * group : (k + 1) * group],
                    )  # fmt: skip
        for n in range(start, stop):
            for g in range(group):
                for d in range(size):
                    out_NHD[n, k * group + g, d] /= total_RG[n - start, g]


@ordered()
def _attend_block(
    q_GD: Any, table_P: Any, first: int, last: int, pool: Any, page_size: int, page_stride: int,
    k_offset: int, v_offset: int, scores_T: Any, peak_G: Any, total_G: Any, out_GD: Any,
) -> None:  # fmt: skip
    """Add the keys `first` to `last` of one block to one row's running softmax."""
    group, size = q_GD.shape
    scale = np.float32(1.0 / np.sqrt(size))
    first_page, last_page = first // page_size, (last - 1) // page_size
    for g in range(group):
        for page in range(first_page, last_page + 1):
            start, stop = max(first, page * page_size), min(last, (page + 1) * page_size)
            place = np.int64(table_P[page]) * page_stride + k_offset
            k_TD = pool[place + (start - page * page_size) * size : place + (stop - page * page_size) * size]
            _score(q_GD[g], k_TD, scale, scores_T[start - first : stop - first])
        _weigh(scores_T, peak_G, total_G, g, out_GD[g])
        for page in range(first_page, last_page + 1):
            start, stop = max(first, page * page_size), min(last, (page + 1) * page_size)
            place = np.int64(table_P[page]) * page_stride + v_offset
            v_TD = pool[place + (start - page * page_size) * size : place + (stop - page * page_size) * size]
            _mix(scores_T[start - first : stop - first], v_TD, out_GD[g])


@ordered()
def _weigh(scores_T: Any, peak_G: Any, total_G: Any, g: int, out_D: Any) -> None:
    """Turn a block's scores into weights, and bring what was summed before to the new peak."""
    best = ordered_bits(np.float32(peak_G[g]).view(np.int32))
    for bits in scores_T.view(np.int32):  # compared as integers, which is vector code; a NaN wins or is passed over
        best = max(best, ordered_bits(bits))
    peak = np.int32(ordered_bits(best)).view(np.float32)
    if peak != peak_G[g]:
        shrink = exp32(peak_G[g] - peak)
        peak_G[g] = peak
        total_G[g] *= shrink
        for d in range(out_D.shape[0]):
            out_D[d] *= shrink
    for t in range(scores_T.shape[0]):
        scores_T[t] = exp32(scores_T[t] - peak)
    total_G[g] += _sum(scores_T)


@reducing()
def _sum(x_T: Any) -> Any:
    total = np.float32(0.0)
    for t in range(x_T.shape[0]):
        total += x_T[t]
    return total


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
