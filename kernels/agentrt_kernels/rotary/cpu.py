"""Rotary positions, and the write of keys and values into their pages, compiled."""

from typing import Any

import numpy as np
from torch import Tensor

from agentrt_kernels.compiled import array, inner, ordered
from agentrt_kernels.half import write
from agentrt_kernels.pages import PageLayout
from agentrt_kernels.rms_norm.cpu import norm_row


def rotary(
    qkv_NE: Tensor, cos_TR: Tensor, sin_TR: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_SP: Tensor,
    pool: Tensor, layout: PageLayout, layer: int, norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:  # fmt: skip
    """Norm (Qwen3) and turn the queries and keys of each row, write K and V to the row's page, and return `q_NHD`.

    The arguments are those of the reference; the pool is of float32 or float16. `qkv_NE` may be overwritten.
    """
    heads_NGD = qkv_NE.contiguous().view(qkv_NE.shape[0], -1, layout.head_dim)
    num_heads = heads_NGD.shape[1] - layout.parts * layout.kv_heads
    if norms is not None:
        q_weight_D, k_weight_D, eps = norms
        num_keys = layout.kv_heads
        _norm_heads(array(heads_NGD), num_heads, num_keys, array(q_weight_D), array(k_weight_D), np.float32(eps))
    q_NHD = qkv_NE.new_empty(qkv_NE.shape[0], num_heads, layout.head_dim)
    _rotary(
        array(heads_NGD), array(cos_TR), array(sin_TR), array(positions_N), array(table_of_N), array(tables_SP),
        array(pool), layout.page_size, layout.page_stride, layer * layout.layer_stride, layout.kv_stride,
        layout.kv_heads, array(q_NHD),
    )  # fmt: skip
    return q_NHD


@ordered()
def _norm_heads(x_NGD: Any, num_heads: int, num_keys: int, q_weight_D: Any, k_weight_D: Any, eps: Any) -> None:
    for n in range(x_NGD.shape[0]):
        norm_heads(x_NGD[n], num_heads, num_keys, q_weight_D, k_weight_D, eps)


@inner()
def norm_heads(x_GD: Any, num_heads: int, num_keys: int, q_weight_D: Any, k_weight_D: Any, eps: Any) -> None:
    """One row's queries and keys, in place."""
    for g in range(num_heads + num_keys):
        norm_row(x_GD[g], q_weight_D if g < num_heads else k_weight_D, eps, x_GD[g])


@inner()
def _turn(x_D: Any, cos_R: Any, sin_R: Any, out: Any, at: int) -> None:
    half, turned = x_D.shape[0] // 2, cos_R.shape[0]
    for d in range(turned):
        write(out, at + d, x_D[d] * cos_R[d] - x_D[half + d] * sin_R[d])
        write(out, at + half + d, x_D[half + d] * cos_R[d] + x_D[d] * sin_R[d])
    for d in range(turned, half):
        write(out, at + d, x_D[d])
        write(out, at + half + d, x_D[half + d])


@ordered()
def _rotary(
    heads_NGD: Any, cos_TR: Any, sin_TR: Any, positions_N: Any, table_of_N: Any, tables_SP: Any,
    pool: Any, page_size: int, page_stride: int, layer_offset: int, kv_stride: int, kv_heads: int, q_NHD: Any,
) -> None:  # fmt: skip
    for n in range(heads_NGD.shape[0]):
        position = positions_N[n]
        page = np.int64(tables_SP[table_of_N[n], position // page_size])
        place = page * page_stride + layer_offset
        turn_row(
            heads_NGD[n], cos_TR[position], sin_TR[position], position, pool, place, page_size, kv_stride, kv_heads,
            q_NHD[n],
        )  # fmt: skip


@inner()
def turn_row(
    heads_GD: Any, cos_R: Any, sin_R: Any, position: int, pool: Any, place: Any, page_size: int, kv_stride: int,
    kv_heads: int, q_HD: Any,
) -> None:  # fmt: skip
    """One row: its queries, turned, to `q_HD`; its keys, turned, and values to its place in the page at `place`.

    `pool` is of float32 or float16; what float16 cannot hold becomes NaN.
    """
    num_heads, size = q_HD.shape
    for h in range(num_heads):
        _turn(heads_GD[h], cos_R, sin_R, q_HD, h * size)
    start = place + (position % page_size) * size
    for k in range(kv_heads):
        at = start + k * page_size * size
        _turn(heads_GD[num_heads + k], cos_R, sin_R, pool, at)
        if kv_stride > 0:
            for d in range(size):
                write(pool, at + kv_stride + d, heads_GD[num_heads + kv_heads + k, d])
