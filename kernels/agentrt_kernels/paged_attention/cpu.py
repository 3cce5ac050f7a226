"""Attention over keys and values in pages, compiled.

A row takes its keys block by block, a block being `KEYS` positions from a multiple of `KEYS` on, with a running softmax:
score the block's keys, turn the scores into weights, mix the values. So its bits depend on its own position, keys and
values alone.

A task is a few neighbouring rows, which walk their blocks together, with all KV heads (whose parts of a page lie side by
side) or, where the rows make too few tasks, with one. Where their tables name the same
pages (the rows of a prompt chunk, siblings over a shared prefix, however their tree branches) these are read from memory
once for all, and the queries are multiplied with them together, by the tiles of a product. Sharing is nothing but an
order of the same operations: there are no partial results to merge, and a row has the same bits with and without siblings.
It pays where rows that share pages are neighbours; the caller sees to that.

In compiled code a *line* is the query of one row and head: row r of a task has the lines r * group to (r + 1) * group of a
KV head, and a task's KV heads follow one another. A
*piece* is what lies in one page, of 16 keys of a block that follow one another.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrt_kernels.compiled import array, inner, ordered, spread
from agentrt_kernels.half import read
from agentrt_kernels.paged_attention.softmax import LOG2_E, largest, weigh
from agentrt_kernels.pages import PageLayout
from agentrt_kernels.product.cpu import multiply, multiply_add
from agentrt_kernels.product.tile import PANEL, WIDTH, prefetch, transpose

KEYS = 64
"""Keys of a block; one page if that is larger."""
ROWS = 16
"""Rows of a task at most: their queries, sums and scores stay in the second-level cache."""
MANY_LINES = 12
"""Lines from which a block's values are brought together, in float32, before the lines are multiplied with them."""
ROOM = np.float32(4.0)
"""By how many powers of two a line's scores may exceed its first ones before its sums are scaled."""
LINE_BYTES = 64
"""Of the processor's caches."""


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
    rows, heads = size_of_task(q_NHD.shape[0], layout.kv_heads, torch.get_num_threads())
    spread(
        _attend, -(-q_NHD.shape[0] // rows) * (layout.kv_heads // heads), attention_nanoseconds(q_NHD.shape, positions),
        rows, heads, array(q_NHD), positions, array(table_of_N), array(tables_SP), array(pool), layout.page_size,
        layout.page_stride, layer * layout.layer_stride, layout.kv_stride, layout.kv_heads, window, array(out_NHD),
    )  # fmt: skip
    return out_NHD


def attention_nanoseconds(shape_NHD: tuple[int, ...], positions_N: Any) -> float:
    """What attention of such queries at such positions takes one thread, about."""
    return 0.03 * 2 * shape_NHD[1] * shape_NHD[2] * int(positions_N.sum())


def size_of_task(rows: int, kv_heads: int, threads: int) -> tuple[int, int]:
    """Its rows, and whether it has all KV heads or one: as much as there may be, with a few tasks left for each thread."""
    size = max(1, min(ROWS, rows // (2 * threads)))
    return size, kv_heads if rows >= size * threads else 1


@ordered()
def _attend(
    begin: int, end: int, rows: int, together: int, q_NHD: Any, positions_N: Any, table_of_N: Any, tables_SP: Any, pool: Any,
    page_size: int, page_stride: int, layer_offset: int, kv_stride: int, kv_heads: int, window: int, out_NHD: Any,
) -> None:  # fmt: skip
    scratch = attention_scratch(together * rows * (q_NHD.shape[1] // kv_heads), q_NHD.shape[2], page_size)
    for task in range(begin, end):
        attend_task(
            task, rows, together, q_NHD, positions_N, table_of_N, tables_SP, pool, page_size, page_stride,
            layer_offset, kv_stride, kv_heads, window, out_NHD, scratch,
        )  # fmt: skip


@inner()
def attention_scratch(lines: int, size: int, page_size: int) -> Any:
    """What a thread works in: queries, sums, scores, peaks and totals of the lines; keys as columns; padded values."""
    keys, wide = block_pages(page_size) * page_size, (size + PANEL - 1) // PANEL * PANEL
    across = (keys + PANEL - 1) // PANEL * PANEL
    columns, values = np.empty(size * PANEL, dtype=np.float32), np.empty(keys * wide, dtype=np.float32)
    for i in range(columns.shape[0]):
        columns[i] = np.float32(0.0)
    for i in range(values.shape[0]):
        values[i] = np.float32(0.0)
    return (
        np.empty((lines, size), dtype=np.float32), np.empty((lines, wide), dtype=np.float32),
        np.empty((lines, across), dtype=np.float32), np.empty(lines, dtype=np.float32),
        np.empty((lines, WIDTH), dtype=np.float32), columns, values,
    )  # fmt: skip


@inner()
def block_pages(page_size: int) -> int:
    return max(1, KEYS // page_size)


@inner()
def attend_task(
    task: int, rows: int, together: int, q_NHD: Any, positions_N: Any, table_of_N: Any, tables_SP: Any, pool: Any,
    page_size: int, page_stride: int, layer_offset: int, kv_stride: int, kv_heads: int, window: int, out_NHD: Any,
    scratch: Any,
) -> None:  # fmt: skip
    """Of the tasks over blocks of `rows` rows and, within one, over so many KV heads `together`, this one."""
    q_LD, sums_LD, _, peaks_L, totals_LW, _, _ = scratch
    count, heads, size = q_NHD.shape
    group = heads // kv_heads
    first_head = task % (kv_heads // together) * together
    start = task // (kv_heads // together) * rows
    stop = min(start + rows, count)
    scale = np.float32(LOG2_E / np.sqrt(size))
    for j in range(together):
        for n in range(start, stop):
            line, head = (j * rows + n - start) * group, (first_head + j) * group
            for g in range(group):
                for d in range(size):
                    q_LD[line + g, d] = q_NHD[n, head + g, d] * scale
    for line in range(sums_LD.shape[0]):
        peaks_L[line] = np.float32(-np.inf)
        for d in range(sums_LD.shape[1]):
            sums_LD[line, d] = np.float32(0.0)
        for lane in range(WIDTH):
            totals_LW[line, lane] = np.float32(0.0)
    block = block_pages(page_size) * page_size
    lowest = highest = positions_N[start]
    for n in range(start + 1, stop):
        lowest, highest = min(lowest, positions_N[n]), max(highest, positions_N[n])
    for at in range(_first_key(lowest, window) // block * block, highest + 1, block):
        n = start
        while n < stop:
            end = n + 1
            if positions_N[n] >= at and _first_key(positions_N[n], window) < at + block:
                while end < stop and _shares(n, end, at, block, positions_N, table_of_N, tables_SP, page_size, window):
                    end += 1
                following, next_at = (end, at) if end < stop else (start, at + block)
                for j in range(together):
                    k_offset = layer_offset + (first_head + j) * page_size * size
                    _attend_block(
                        n, end, (j * rows - start) * group, group, at, block, positions_N, tables_SP, table_of_N[n], pool,
                        page_size, page_stride, k_offset, k_offset + kv_stride, window, table_of_N[following], next_at - at,
                        positions_N[following] + 1, scratch,
                    )  # fmt: skip
            n = end
    for j in range(together):
        for n in range(start, stop):
            for g in range(group):
                line = (j * rows + n - start) * group + g
                total = np.float32(0.0)
                for lane in range(WIDTH):
                    total += totals_LW[line, lane]
                for d in range(size):
                    out_NHD[n, (first_head + j) * group + g, d] = sums_LD[line, d] / total


@inner()
def _first_key(position: int, window: int) -> int:
    return max(0, position - window + 1) if window > 0 else 0


@inner()
def _shares(
    n: int, other: int, at: int, block: int, positions_N: Any, table_of_N: Any, tables_SP: Any, page_size: int,
    window: int,
) -> bool:  # fmt: skip
    """Whether two rows take this block's keys from the same pages."""
    if positions_N[other] < at or _first_key(positions_N[other], window) >= at + block:
        return False
    if table_of_N[n] != table_of_N[other]:
        for page in range(at // page_size, min((at + block) // page_size, tables_SP.shape[1])):
            if tables_SP[table_of_N[n], page] != tables_SP[table_of_N[other], page]:
                return False
    return True


@inner(inline="always")
def _attend_block(
    begin: int, end: int, base: int, group: int, at: int, block: int, positions_N: Any, tables_SP: Any, table: int,
    pool: Any, page_size: int, page_stride: int, k_offset: int, v_offset: int, window: int, next_table: int, further: int,
    next_reach: int, scratch: Any,
) -> None:  # fmt: skip
    """Add the keys of the block from `at` on to the running softmax of the rows `begin` to `end`.

    A row's first line of the KV head is `base` + row * `group`. The keys that come next, `further` on by the table
    `next_table`, are read ahead.
    """
    q_LD, sums_LD, scores_LT, peaks_L, totals_LW, keys, values = scratch
    size, wide, across = q_LD.shape[1], sums_LD.shape[1], scores_LT.shape[1]
    line, lines = base + begin * group, (end - begin) * group
    first, reach = at + block, at
    for r in range(begin, end):
        first, reach = min(first, _first_key(positions_N[r], window)), max(reach, positions_N[r] + 1)
    first, last = max(first, at), min(reach, at + block)
    piece = first
    while piece < last:
        stop = _piece_end(piece, last, at, page_size)
        page, token = piece // page_size, piece % page_size
        place = np.int64(tables_SP[table, page]) * page_stride + k_offset
        _fetch(pool, place - k_offset + v_offset + token * size, (stop - piece) * size)
        _turn_keys(pool, place, token, stop - piece, page_size, size, (piece - at) % PANEL, keys)
        piece = stop
        if piece == last or (piece - at) % PANEL == 0:
            panel = (piece - 1 - at) // PANEL * PANEL
            multiply(lines, q_LD, line * size, size, keys, 0, PANEL, size, scores_LT, line * across + panel, across, 0)
    lowest, beyond = (first - at) // WIDTH * WIDTH, (last - at + WIDTH - 1) // WIDTH * WIDTH
    for r in range(begin, end):
        mine, to = max(_first_key(positions_N[r], window), at) - at, min(positions_N[r] + 1, at + block) - at
        if mine > lowest or to < beyond:
            for one in range(base + r * group, base + (r + 1) * group):
                for t in range(lowest, mine):
                    scores_LT[one, t] = np.float32(-np.inf)
                for t in range(to, beyond):
                    scores_LT[one, t] = np.float32(-np.inf)
    _weigh(scores_LT, line, line + lines, lowest, beyond, peaks_L, totals_LW, sums_LD)
    in_place = wide == size and lines < MANY_LINES
    piece = first
    while piece < last:
        stop = _piece_end(piece, last, at, page_size)
        page, token = piece // page_size, piece % page_size
        place = np.int64(tables_SP[table, page]) * page_stride + v_offset + token * size
        if piece + further < next_reach:
            following = (
                np.int64(tables_SP[next_table, (piece + further) // page_size]) * page_stride + k_offset + token * size
            )
            _fetch(pool, following, (stop - piece) * size)
        if in_place:
            x_at = line * across + piece - at
            for d in range(0, size, PANEL):
                multiply_add(
                    lines, scores_LT, x_at, across, pool, place + d, size, stop - piece, sums_LD, line * wide + d, wide
                )
        else:
            for t in range(stop - piece):
                to = (piece - first + t) * wide
                _widen(pool, place + t * size, size, values, to)
        piece = stop
    if not in_place:
        x_at = line * across + first - at
        for d in range(0, wide, PANEL):
            multiply_add(lines, scores_LT, x_at, across, values, d, wide, last - first, sums_LD, line * wide + d, wide)


@inner()
def _widen(pool: Any, place: Any, size: int, out: Any, to: int) -> None:
    for d in range(size):
        out[to + d] = read(pool, place + d)


@inner()
def _fetch(pool: Any, place: Any, count: int) -> None:
    """Have memory read ahead: pages lie apart, and the processor by itself reads ahead within a stretch only."""
    for at in range(0, count, LINE_BYTES // pool.itemsize):
        prefetch(pool, place + at)


@inner()
def _piece_end(start: int, last: int, at: int, page_size: int) -> int:
    return min(last, (start // page_size + 1) * page_size, at + ((start - at) // PANEL + 1) * PANEL)


@inner()
def _turn_keys(
    pool: Any, place: Any, token: int, count: int, page_size: int, size: int, column: int, keys: Any
) -> None:
    """Write the keys of a piece as columns, from `column` on; of a page of whole eights also those beside the piece."""
    if page_size % 8 == 0 and size % 8 == 0:
        extra = token % 8
        for t in range(0, count + extra, 8):
            for d in range(0, size, 8):
                at = place + (token - extra + t) * size + d
                transpose(pool, at, size, keys, d * PANEL + column - extra + t, PANEL)
    else:
        for t in range(count):
            for d in range(size):
                keys[d * PANEL + column + t] = read(pool, place + (token + t) * size + d)


@inner()
def _weigh(
    scores_LT: Any, begin: int, end: int, lowest: int, beyond: int, peaks_L: Any, totals_LW: Any, sums_LD: Any
) -> None:  # fmt: skip
    """Turn the scores of some lines into weights, and bring what was summed before to the new peaks.

    A peak is a power of two that no weight is above, and has `ROOM` for more: it seldom changes, and then by factors that
    round nothing. The weights of all lines follow the peaks of all, so that none waits for what its line's scores say.
    """
    across, count = scores_LT.shape[1], beyond - lowest
    for line in range(begin, end):
        best = largest(scores_LT, line * across + lowest, count)
        if best > peaks_L[line]:
            peak = np.ceil(best) + ROOM
            shrink = _power_of_two(peaks_L[line] - peak)
            peaks_L[line] = peak
            totals_W, sums_D = totals_LW[line], sums_LD[line]
            for lane in range(WIDTH):
                totals_W[lane] *= shrink
            for d in range(sums_D.shape[0]):
                sums_D[d] *= shrink
    for line in range(begin, end):
        weigh(scores_LT, line * across + lowest, count, peaks_L[line], totals_LW, line * WIDTH)


@inner()
def _power_of_two(n: Any) -> Any:
    """2^n of a whole number that is at most 0; 0 below -126."""
    return np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32) if n >= -126 else np.float32(0.0)
