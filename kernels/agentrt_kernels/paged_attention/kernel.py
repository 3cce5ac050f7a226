"""Attention over keys and values in pages, as Triton kernels.

A program of `attend_kernel` is one item of a plan (see `plan.py`) and one KV head: some rows against one stretch of
keys, with a running softmax. The lanes of its tile are the rows' query heads that share the KV head. `attend_wide_kernel`
is the same for latent attention. What several items have of one row, `merge_kernel` puts together by the logarithms of
their sums.
"""

import triton
import triton.language as tl


@triton.jit
def attend_kernel(
    q_NHD, positions_N, table_of_N, tables_SP, pool, scales, items_I5,
    out_NHD, partial_XHD, lse_XH, num_places, page_stride, layer_offset,
    kv_stride, kv_heads, window, scale, cap,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr, QUANTISED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """`scale` is that of the scores times log2(e), and `cap`, which bounds them if CAPPED, is so too. SIZE is the head's,
    GROUP the query heads of a KV head.

    An item's slot is where its rows' parts go, -1 if it has all of them: then they go to `out_NHD`. With QUANTISED,
    `scales` is the pool seen as float32.
    """
    item, head = items_I5 + tl.program_id(0) * 5, tl.program_id(1)
    first_row, num_rows = tl.load(item), tl.load(item + 1)
    first_key, stop_key, slot = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    if num_rows == 0:
        return
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row, query_head = m // GROUP, head * GROUP + m % GROUP
    live = row < num_rows
    inside = live[:, None] & (d < SIZE)[None, :]
    position = tl.load(positions_N + first_row + row, mask=live, other=-1).to(tl.int32)
    heads = kv_heads * GROUP
    places = ((first_row + row).to(tl.int64) * heads + query_head)[:, None] * SIZE + d[None, :]
    q = tl.load(q_NHD + places, mask=inside, other=0.0)
    table = tables_SP + tl.load(table_of_N + first_row) * num_places
    stop_key = tl.minimum(stop_key, tl.max(position, axis=0) + 1)
    if window > 0:
        first_key = tl.maximum(first_key, tl.min(tl.where(live, position, 2147483647), axis=0) - window + 1)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first_key, stop_key, BLOCK_T):
        key = start + tl.arange(0, BLOCK_T)
        there = key < stop_key
        page = tl.load(table + key // PAGE, mask=there, other=0).to(tl.int64)
        block = page * page_stride + layer_offset
        token = head * PAGE + key % PAGE
        k = tl.load(
            pool + (block + token * SIZE)[None, :] + d[:, None], mask=there[None, :] & (d < SIZE)[:, None], other=0.0
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if QUANTISED:
            scale_of = scales + (block + kv_heads * PAGE * SIZE) // 4 + token
            scores *= tl.load(scale_of, mask=there, other=0.0)[None, :]
        if CAPPED:
            scores = cap * (2.0 * tl.sigmoid(2.0 / cap * scores) - 1.0)  # a hyperbolic tangent
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if window > 0:
            seen &= key[None, :] > position[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # no key seen yet: keep the exponents numbers
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, axis=1)
        peak = new_peak
        v = tl.load(
            pool + (block + kv_stride + token * SIZE)[:, None] + d[None, :],
            mask=there[:, None] & (d < SIZE)[None, :], other=0.0,
        )  # fmt: skip
        if QUANTISED:
            weights *= tl.load(scale_of + kv_stride // 4, mask=there, other=0.0)[None, :]
        out = out * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")

    out = out / tl.where(total > 0.0, total, 1.0)[:, None]
    if slot < 0:
        tl.store(out_NHD + places, out.to(out_NHD.dtype.element_ty), mask=inside)
    else:
        part = (slot + row).to(tl.int64) * heads + query_head
        tl.store(partial_XHD + part[:, None] * SIZE + d[None, :], out, mask=inside)
        tl.store(lse_XH + part, peak + tl.log2(total), mask=live)


@triton.jit
def attend_wide_kernel(
    q_NHD, positions_N, table_of_N, tables_SP, pool, items_I5, out_NHD, partial_XHD, lse_XH,
    num_places, page_stride, layer_offset, heads, scale,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One head of keys too wide for a tile, whose values they are (latent attention); no window, no scales.

    The rows of an item and all their query heads are cut into BLOCK_M lanes a program. Keys are read once and multiplied
    twice. Their width is cut in two: BLOCK_A is at most SIZE, BLOCK_A + BLOCK_B at least.
    """
    item = items_I5 + tl.program_id(0) * 5
    first_row, num_rows = tl.load(item), tl.load(item + 1)
    first_key, stop_key, slot = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    lane = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, query_head = lane // heads, lane % heads
    live = row < num_rows
    if tl.program_id(1) * BLOCK_M >= num_rows * heads:
        return
    a, b = tl.arange(0, BLOCK_A), BLOCK_A + tl.arange(0, BLOCK_B)
    position = tl.load(positions_N + first_row + row, mask=live, other=-1).to(tl.int32)
    place = ((first_row + row).to(tl.int64) * heads + query_head)[:, None] * SIZE
    in_b = live[:, None] & (b < SIZE)[None, :]
    q_a = tl.load(q_NHD + place + a[None, :], mask=live[:, None], other=0.0)
    q_b = tl.load(q_NHD + place + b[None, :], mask=in_b, other=0.0)
    table = tables_SP + tl.load(table_of_N + first_row) * num_places
    stop_key = tl.minimum(stop_key, tl.max(position, axis=0) + 1)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out_a, out_b = tl.zeros([BLOCK_M, BLOCK_A], tl.float32), tl.zeros([BLOCK_M, BLOCK_B], tl.float32)
    for start in range(first_key, stop_key, BLOCK_T):
        key = start + tl.arange(0, BLOCK_T)
        there = key < stop_key
        page = tl.load(table + key // PAGE, mask=there, other=0).to(tl.int64)
        token = (pool + page * page_stride + layer_offset + key % PAGE * SIZE)[:, None]
        k_a = tl.load(token + a[None, :], mask=there[:, None], other=0.0).to(q_a.dtype)
        k_b = tl.load(token + b[None, :], mask=there[:, None] & (b < SIZE)[None, :], other=0.0).to(q_a.dtype)
        scores = tl.dot(q_a, tl.trans(k_a), input_precision="ieee")
        scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision="ieee") * scale
        scores = tl.where(there[None, :] & (key[None, :] <= position[:, None]), scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # no key seen yet: keep the exponents numbers
        weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, axis=1)
        peak = new_peak
        weights = weights.to(q_a.dtype)
        out_a = tl.dot(weights, k_a, out_a * shrink[:, None], input_precision="ieee")
        out_b = tl.dot(weights, k_b, out_b * shrink[:, None], input_precision="ieee")

    sums = tl.where(total > 0.0, total, 1.0)[:, None]
    out_a, out_b = out_a / sums, out_b / sums
    if slot < 0:
        tl.store(out_NHD + place + a[None, :], out_a.to(out_NHD.dtype.element_ty), mask=live[:, None])
        tl.store(out_NHD + place + b[None, :], out_b.to(out_NHD.dtype.element_ty), mask=in_b)
    else:
        part = (slot + row).to(tl.int64) * heads + query_head
        tl.store(partial_XHD + part[:, None] * SIZE + a[None, :], out_a, mask=live[:, None])
        tl.store(partial_XHD + part[:, None] * SIZE + b[None, :], out_b, mask=in_b)
        tl.store(lse_XH + part, peak + tl.log2(total), mask=live)


@triton.jit
def merge_kernel(
    partial_XHD, lse_XH, slots_NC, out_NHD, heads, num_parts,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program is one head of one row; rows whose first slot is -1 are complete already. Logarithms are to base 2."""
    n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_NC + n * num_parts)
    if slot < 0:
        return
    d = tl.arange(0, BLOCK_D)
    peak, total = float("-inf"), 0.0
    out = tl.zeros([BLOCK_D], tl.float32)
    for part in range(num_parts):
        slot = tl.load(slots_NC + n * num_parts + part)
        if slot >= 0:
            place = slot.to(tl.int64) * heads + head
            lse = tl.load(lse_XH + place)
            new_peak = tl.maximum(peak, lse)
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # stretches wholly before a window are empty
            shrink, weight = tl.exp2(peak - base), tl.exp2(lse - base)
            total = total * shrink + weight
            out = out * shrink + weight * tl.load(partial_XHD + place * SIZE + d, mask=d < SIZE, other=0.0)
            peak = new_peak
    tl.store(out_NHD + (n * heads + head) * SIZE + d, (out / total).to(out_NHD.dtype.element_ty), mask=d < SIZE)
