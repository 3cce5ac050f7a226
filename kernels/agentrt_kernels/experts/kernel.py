"""Products of rows with the matrices of the experts that they chose, as a Triton kernel.

Rows stand sorted by expert. A program is a tile of the output: some rows of one expert, found by where the experts' tiles
end, so nothing need be known on the host of how rows are spread.
"""

import triton
import triton.language as tl


@triton.jit
def grouped_matmul_kernel(
    x_RI, rows_P, weight_EOI, starts_E, tile_ends_E, out_PO, experts, width, outputs,
    BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """`out[p] = weight[expert of p] @ x[rows[p]]`; `starts_E` has one more entry, the number of all rows."""
    tile = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(tile_ends_E + e, mask=e < experts, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    if expert >= experts:
        return
    first_tile = tl.max(tl.where(ends <= tile, ends, 0), axis=0)
    start, stop = tl.load(starts_E + expert), tl.load(starts_E + expert + 1)
    p = start + (tile - first_tile) * BLOCK_P + tl.arange(0, BLOCK_P)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    live, in_outputs = p < stop, o < outputs
    x_start = x_RI + tl.load(rows_P + p, mask=live, other=0).to(tl.int64)[:, None] * width
    weight_start = weight_EOI + (expert.to(tl.int64) * outputs + o)[None, :] * width
    sums = tl.zeros([BLOCK_P, BLOCK_O], tl.float32)
    for first in range(0, width, BLOCK_I):
        i = first + tl.arange(0, BLOCK_I)
        x = tl.load(x_start + i[None, :], mask=live[:, None] & (i < width)[None, :], other=0.0)
        weight = tl.load(weight_start + i[:, None], mask=in_outputs[None, :] & (i < width)[:, None], other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    places = out_PO + p.to(tl.int64)[:, None] * outputs + o[None, :]
    tl.store(places, sums.to(out_PO.dtype.element_ty), mask=live[:, None] & in_outputs[None, :])
