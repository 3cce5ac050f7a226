"""Pages of int8 under the operations that read and write them in float32, compiled.

A key or value of one head is rounded when it is written, with a scale of its own, and whatever attends it reads the
rounded one, the row that wrote it too. So a row's bits depend on its own pages alone, however the prompt was cut into
chunks and wherever its pages came from. Both operations go through a small float32 pool of the pages that they touch,
one layer deep: the cost is that of reading those pages once more, the gain a fourth of the memory.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt_kernels.compiled import array, inner, ordered, spread
from agentrt_kernels.paged_attention import cpu as float_attention
from agentrt_kernels.pages import PageLayout
from agentrt_kernels.rotary import cpu as float_rotary

LARGEST = np.float32(127.0)


class _Pages(NamedTuple):
    """Some pages of the pool, one layer of each, to be held in a pool of their own."""

    pages_U: NDArray[np.int64]
    tables_SP: Tensor
    """The caller's tables, over these pages."""
    layout: PageLayout


def rotary(
    qkv_NE: Tensor, cos_TR: Tensor, sin_TR: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_SP: Tensor,
    pool: Tensor, layout: PageLayout, layer: int, norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:  # fmt: skip
    """As `rotary.reference`, into a pool of int8 whose layout has a scale."""
    pages_N = array(tables_SP)[array(table_of_N), array(positions_N) // layout.page_size].astype(np.int64)
    some = _pages(pages_N, tables_SP, pool, layout)
    plain = torch.empty(len(some.pages_U) * some.layout.page_stride)
    q_NHD = float_rotary.rotary(
        qkv_NE, cos_TR, sin_TR, positions_N, table_of_N, some.tables_SP, plain, some.layout, 0, norms
    )
    places_N = np.searchsorted(some.pages_U, pages_N)
    _store(
        pages_N, places_N, array(positions_N), array(plain), array(pool), array(pool).view(np.float32), layout.page_size,
        layout.kv_heads, layout.head_dim, layout.page_stride, layer * layout.layer_stride, layout.kv_stride,
    )  # fmt: skip
    return q_NHD


def paged_attention(
    q_NHD: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_SP: Tensor,
    pool: Tensor, layout: PageLayout, layer: int, window: int = 0,
) -> Tensor:  # fmt: skip
    """As `paged_attention.reference`, over a pool of int8 whose layout has a scale."""
    tables = array(tables_SP)
    some = _pages(tables[tables >= 0], tables_SP, pool, layout)
    plain = torch.empty(len(some.pages_U) * some.layout.page_stride)
    spread(
        _load, len(some.pages_U), 0.5 * plain.numel(), some.pages_U, array(plain), array(pool),
        array(pool).view(np.float32), layout.page_size, layout.kv_heads, layout.head_dim, layout.page_stride,
        layer * layout.layer_stride, layout.kv_stride,
    )  # fmt: skip
    return float_attention.paged_attention(
        q_NHD, positions_N, table_of_N, some.tables_SP, plain, some.layout, 0, window
    )


def _pages(touched: NDArray[Any], tables_SP: Tensor, pool: Tensor, layout: PageLayout) -> _Pages:
    is_touched = np.zeros(pool.numel() // layout.page_stride, dtype=np.bool_)
    is_touched[touched] = True
    pages_U = np.flatnonzero(is_touched)
    place = np.full(len(is_touched) + 1, -1, dtype=np.int32)  # the last one is that of -1, no page
    place[pages_U] = np.arange(len(pages_U))
    return _Pages(pages_U, torch.from_numpy(place[array(tables_SP)]), layout._replace(num_layers=1, scale_size=0))


@ordered()
def _store(
    pages_N: Any, places_N: Any, positions_N: Any, plain: Any, pool: Any, scales: Any, page_size: int, kv_heads: int,
    size: int, page_stride: int, layer_offset: int, kv_stride: int,
) -> None:  # fmt: skip
    """Round what the rows have written to `plain` into their places in `pool`."""
    values = kv_heads * page_size * size
    for n in range(len(pages_N)):
        for head in range(2 * kv_heads):
            kind, token = head // kv_heads, head % kv_heads * page_size + positions_N[n] % page_size
            x_D = plain[(places_N[n] * 2 + kind) * values + token * size :][:size]
            start = pages_N[n] * page_stride + layer_offset + kind * kv_stride
            scales[(start + values) // 4 + token] = _round(x_D, pool[start + token * size :][:size])


@ordered()
def _round(x_D: Any, out_D: Any) -> Any:
    """Write x / scale, rounded, to `out_D`, and return the scale: x's largest magnitude becomes 127.

    The scale is NaN if one of them is no finite number.
    """
    peak = _peak(x_D)
    scale = peak / LARGEST if peak > 0 else np.float32(1.0)
    if not peak < np.inf:
        scale = np.float32(np.nan)
    for d in range(len(x_D)):
        out_D[d] = np.int8(np.rint(x_D[d] / scale))
    return scale


@inner()
def _peak(x_D: Any) -> Any:
    """The largest magnitude, by comparing integers, which is vector code: infinity is above all numbers, NaN above it."""
    bits_D, largest = x_D.view(np.int32), np.int32(0)
    for d in range(bits_D.shape[0]):
        bits = np.int32(bits_D[d] & np.int32(0x7FFFFFFF))
        largest = bits if bits > largest else largest
    return np.int32(largest).view(np.float32)


@ordered()
def _load(
    begin: int, end: int, pages_U: Any, plain: Any, pool: Any, scales: Any, page_size: int, kv_heads: int, size: int,
    page_stride: int, layer_offset: int, kv_stride: int,
) -> None:  # fmt: skip
    """Write the values of one layer of these pages to `plain`."""
    tokens = kv_heads * page_size
    for u in range(begin, end):
        for kind in range(2):
            start = pages_U[u] * page_stride + layer_offset + kind * kv_stride
            for token in range(tokens):
                scale = scales[(start + tokens * size) // 4 + token]
                q_D = pool[start + token * size :][:size]
                x_D = plain[((u * 2 + kind) * tokens + token) * size :][:size]
                for d in range(size):
                    x_D[d] = np.float32(q_D[d]) * scale
