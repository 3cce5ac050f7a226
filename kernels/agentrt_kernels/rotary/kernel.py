"""Rotary positions and the write of KV, as a Triton kernel: a program is one head of one row."""

import triton
import triton.language as tl

from agentrt_kernels.quantized.kernel import has_odd, quantize


@triton.jit
def rotary_kernel(
    qkv_NE, cos_TR, sin_TR, positions_N, table_of_N, tables_SP,
    q_weight_D, k_weight_D, eps, pool, scales, q_NHD,
    num_places, page_stride, layer_offset, kv_stride, heads, kv_heads,
    PAGE: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    NORMED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """HALF is half a head's size, of which TURNED dimensions turn, BLOCK the next power of two.

    Heads count through queries, keys and (with two PARTS) values.

    With LARGEST, the pool's elements are quantised up to it, and `scales` is the pool seen as float32.
    """
    n, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = tl.arange(0, BLOCK)
    inside = r < HALF
    start = qkv_NE + (n * (heads + PARTS * kv_heads) + g) * 2 * HALF
    first = tl.load(start + r, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + HALF + r, mask=inside, other=0.0).to(tl.float32)
    position = tl.load(positions_N + n)
    if g < heads + kv_heads:
        if NORMED:
            scale = 1.0 / tl.sqrt(tl.sum(first * first + second * second, axis=0) / (2 * HALF) + eps)
            weight_D = q_weight_D if g < heads else k_weight_D
            first = tl.load(weight_D + r, mask=inside, other=0.0).to(tl.float32) * (first * scale)
            second = tl.load(weight_D + HALF + r, mask=inside, other=0.0).to(tl.float32) * (second * scale)
        cos = tl.load(cos_TR + position * TURNED + r, mask=r < TURNED, other=1.0)
        sin = tl.load(sin_TR + position * TURNED + r, mask=r < TURNED, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    if g < heads:
        out = q_NHD + (n * heads + g) * 2 * HALF
        tl.store(out + r, first.to(q_NHD.dtype.element_ty), mask=inside)
        tl.store(out + HALF + r, second.to(q_NHD.dtype.element_ty), mask=inside)
    else:
        page = tl.load(tables_SP + tl.load(table_of_N + n) * num_places + position // PAGE).to(tl.int64)
        k, is_value = (g - heads) % kv_heads, (g - heads) // kv_heads
        block = page * page_stride + layer_offset + is_value * kv_stride
        token = k * PAGE + position % PAGE
        place = pool + block + token * 2 * HALF + r
        if LARGEST > 0:
            peak = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=0)
            is_odd = has_odd(first) | has_odd(second)
            step = tl.where(peak > 0.0, peak / LARGEST, 1.0)
            tl.store(scales + (block + kv_heads * PAGE * 2 * HALF) // 4 + token, tl.where(is_odd, float("nan"), step))
            first, second = tl.where(is_odd, 0.0, first) / step, tl.where(is_odd, 0.0, second) / step
            tl.store(place, quantize(first, pool.dtype.element_ty), mask=inside)
            tl.store(place + HALF, quantize(second, pool.dtype.element_ty), mask=inside)
        else:
            tl.store(place, first.to(pool.dtype.element_ty), mask=inside)
            tl.store(place + HALF, second.to(pool.dtype.element_ty), mask=inside)
