"""Products with weights in 8 bits, as a Triton kernel: a program is a tile of the output."""

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    x_NI, weight_OI, x_scales_N, scales_O, out_NO, rows, width, outputs,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """With WHOLE, `x_NI` is int8 with a scale a row and sums are whole numbers; else weights become `x_NI`'s type."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    x_start = x_NI + n.to(tl.int64)[:, None] * width
    weight_start = weight_OI + o.to(tl.int64)[None, :] * width
    sums = tl.zeros([BLOCK_N, BLOCK_O], tl.int32 if WHOLE else tl.float32)
    for start in range(0, width, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        x = tl.load(x_start + i[None, :], mask=(n < rows)[:, None] & (i < width)[None, :], other=0)
        weight = tl.load(weight_start + i[:, None], mask=(o < outputs)[None, :] & (i < width)[:, None], other=0)
        if WHOLE:
            sums += tl.dot(x, weight, out_dtype=tl.int32)
        else:
            sums += tl.dot(x, weight.to(x.dtype), input_precision="ieee")
    out = sums.to(tl.float32)
    if WHOLE:
        out *= tl.load(x_scales_N + n, mask=n < rows, other=0.0)[:, None]
    out *= tl.load(scales_O + o, mask=o < outputs, other=0.0)[None, :]
    places = out_NO + n.to(tl.int64)[:, None] * outputs + o[None, :]
    tl.store(places, out.to(out_NO.dtype.element_ty), mask=(n < rows)[:, None] & (o < outputs)[None, :])
