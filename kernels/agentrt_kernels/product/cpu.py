"""The product of activations with a packed weight, compiled.

A weight lies in panels of 16 outputs, float16 (as its bits, uint16) or float32; sums are float32. An element is its terms
taken in order, whatever else is computed in the call, so a row's bits are its own. Reading the weights bounds a product
of few rows: float16 halves them, and while one panel is multiplied the next one is read. From 32 rows on 85 to 95 % of
what the processor can multiply was seen, so float16 is widened at no cost.
`bench/products.py` has FBGEMM's beside it.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt_kernels.compiled import array, inner, ordered, spread
from agentrt_kernels.product.tile import MOST_ROWS, PANEL, make_tile

Panels = NDArray[np.uint16] | NDArray[np.float32]
"""Flat: panel by panel, then term by term, the panel's columns. The last panel is filled up with zeros."""
BLOCK_ROWS = 48
"""Rows that all panels of a stretch see before the next rows come: both stay in the second-level cache."""
WIDE = 4
"""Panels that one row takes at once."""
MOST_PANELS = 8
"""Panels of a stretch at most."""

_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (make_tile(rows) for rows in range(1, MOST_ROWS + 1))
_wide = make_tile(1, panels=WIDE)
_adds_1, _adds_2, _adds_3, _adds_4, _adds_5, _adds_6 = (make_tile(rows, adds=True) for rows in range(1, MOST_ROWS + 1))


def pack(weight_OI: Tensor, dtype: torch.dtype) -> Panels:
    """The panels of a weight, in float16 or float32."""
    outputs, inputs = weight_OI.shape
    padded = torch.zeros(padded_width(outputs), inputs, dtype=dtype)
    padded[:outputs] = weight_OI
    panels: NDArray[Any] = padded.view(-1, PANEL, inputs).transpose(1, 2).contiguous().flatten().numpy()
    return panels.view(np.uint16) if dtype == torch.float16 else panels


def padded_width(outputs: int) -> int:
    """The width of the panels together."""
    return -(-outputs // PANEL) * PANEL


def product(x_NI: Tensor, panels: Panels, outputs: int) -> Tensor:
    """`x_NI @ weight_OI.T`, of whose result the first `outputs` columns are looked at."""
    rows = x_NI.shape[0]
    out_NO = x_NI.new_empty(rows, padded_width(outputs))
    if rows:
        stretch = panels_of_stretch(rows, padded_width(outputs))
        count = -(-out_NO.shape[1] // (PANEL * stretch))
        spread(_stretches, count, product_nanoseconds(rows, panels), stretch, array(x_NI), panels, out_NO.numpy())
    return out_NO[:, :outputs]


def product_nanoseconds(rows: int, panels: Panels) -> float:
    """What a product of so many rows takes one thread, about: to read the weight, or to multiply."""
    return max(0.1 * panels.nbytes, 0.04 * rows * panels.size)


@ordered()
def panels_of_stretch(rows: int, width: int) -> int:
    """Few enough that the stretches of one product can be dealt evenly; many where all rows do not stay in the cache."""
    if rows > BLOCK_ROWS:
        return MOST_PANELS if width >= 12 * MOST_PANELS * PANEL else WIDE
    return WIDE if rows == 1 else 2


@ordered()
def _stretches(first: int, last: int, stretch: int, x_NI: Any, panels: Any, out_NO: Any) -> None:
    multiply_panels(first * stretch, last * stretch, last * stretch, x_NI, panels, 0, out_NO)


@inner(inline="always")
def multiply_panels(
    first: int, last: int, following: int, x_NI: Any, panels: Any, panels_at: int, out_NO: Any
) -> None:  # fmt: skip
    """The columns of some panels, as far as there are so many. `panels_at` is where the weight begins in `panels`.

    While the last of them is multiplied, the panel `following` is read.
    """
    rows, depth = x_NI.shape
    width = out_NO.shape[1]
    last = min(last, width // PANEL)
    while rows == 1 and first + WIDE <= last:
        at = panels_at + first * depth * PANEL
        _wide(x_NI, 0, depth, panels, at, PANEL, depth, out_NO, first * PANEL, width, 0, 0)
        first += WIDE
    for start in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - start)
        for panel in range(first, last):
            panel_at = panels_at + panel * depth * PANEL
            ahead = panels_at + (panel + 1 if panel + 1 < last else following) * depth * PANEL
            out_at = start * width + panel * PANEL
            multiply(count, x_NI, start * depth, depth, panels, panel_at, PANEL, depth, out_NO, out_at, width, ahead)


@inner()
def _next_tile(rows: int) -> int:
    """Rows of the next tile: the last two share what is left, as a tile of few rows waits for its sums."""
    if rows <= MOST_ROWS:
        return rows
    return MOST_ROWS if rows >= 2 * MOST_ROWS else (rows + 1) >> 1


@inner()
def multiply(
    rows: int, x: Any, x_at: int, x_stride: int, panel: Any, panel_at: int, panel_stride: int, depth: int, out: Any,
    out_at: int, out_stride: int, ahead: int,
) -> None:  # fmt: skip
    """Any number of rows times one panel; the arguments are a tile's. Meanwhile the panel at `ahead` is read."""
    at, to = x_at, out_at
    tiles = (rows + MOST_ROWS - 1) // MOST_ROWS
    step = (panel_stride + tiles - 1) // tiles
    while rows > 0:
        count = _next_tile(rows)
        if count == 6:
            _tile_6(x, at, x_stride, panel, panel_at, panel_stride, depth, out, to, out_stride, ahead, step)
        elif count == 5:
            _tile_5(x, at, x_stride, panel, panel_at, panel_stride, depth, out, to, out_stride, ahead, step)
        elif count == 4:
            _tile_4(x, at, x_stride, panel, panel_at, panel_stride, depth, out, to, out_stride, ahead, step)
        elif count == 3:
            _tile_3(x, at, x_stride, panel, panel_at, panel_stride, depth, out, to, out_stride, ahead, step)
        elif count == 2:
            _tile_2(x, at, x_stride, panel, panel_at, panel_stride, depth, out, to, out_stride, ahead, step)
        else:
            _tile_1(x, at, x_stride, panel, panel_at, panel_stride, depth, out, to, out_stride, ahead, step)
        rows -= count
        at += count * x_stride
        to += count * out_stride
        ahead += depth * step


@inner()
def multiply_add(
    rows: int, x: Any, x_at: int, x_stride: int, panel: Any, panel_at: int, panel_stride: int, depth: int, out: Any,
    out_at: int, out_stride: int,
) -> None:  # fmt: skip
    """As `multiply`, on top of what `out` has."""
    at, to = x_at, out_at
    while rows > 0:
        count = _next_tile(rows)
        if count == 6:
            _adds_6(x, at, x_stride, panel, panel_at, panel_stride, depth, out, to, out_stride, 0, 0)
        elif count == 5:
            _adds_5(x, at, x_stride, panel, panel_at, panel_stride, depth, out, to, out_stride, 0, 0)
        elif count == 4:
            _adds_4(x, at, x_stride, panel, panel_at, panel_stride, depth, out, to, out_stride, 0, 0)
        elif count == 3:
            _adds_3(x, at, x_stride, panel, panel_at, panel_stride, depth, out, to, out_stride, 0, 0)
        elif count == 2:
            _adds_2(x, at, x_stride, panel, panel_at, panel_stride, depth, out, to, out_stride, 0, 0)
        else:
            _adds_1(x, at, x_stride, panel, panel_at, panel_stride, depth, out, to, out_stride, 0, 0)
        rows -= count
        at += count * x_stride
        to += count * out_stride
