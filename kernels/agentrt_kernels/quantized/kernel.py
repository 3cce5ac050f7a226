"""Rounding to int8 or float8, for kernels that write what others read with a scale."""

import triton
import triton.language as tl


@triton.jit
def quantize(x, dtype: tl.constexpr):
    """Float32 numbers within the type's range to the nearest of int8 or float8 e4m3; halves go to the even one.

    Rounded here, so that the conversion is exact: Triton's interpreter does not round to float8 as a GPU does.
    """
    if dtype == tl.int8:
        # 1.5 * 2^23: a float32 of this size has no fraction, so the sum is rounded to a whole number.
        return (x + 12582912.0 - 12582912.0).to(tl.int8)
    # Three bits of mantissa; below 2^-6, multiples of 2^-9, which float32 numbers of the size of 1.5 * 2^14 are.
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(tl.abs(x) < 0.015625, x + 24576.0 - 24576.0, rounded.to(tl.float32, bitcast=True)).to(dtype)


@triton.jit
def has_odd(x):
    """Whether one of the numbers is NaN or infinite, which no int8 can say: then the scale is NaN."""
    return tl.max(tl.where(tl.abs(x) <= 3.4028234663852886e38, 0, 1), axis=0) > 0


@triton.jit
def quantize_rows_kernel(
    x_ND,
    out_ND,
    scales_N,
    width,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program is one row."""
    n = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ND + n * width + columns, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(x), axis=0)
    is_odd = has_odd(x)
    scale = tl.where(peak > 0.0, peak / LARGEST, 1.0)
    tl.store(scales_N + n, tl.where(is_odd, float("nan"), scale))
    x = tl.where(is_odd, 0.0, x) / scale
    tl.store(out_ND + n * width + columns, quantize(x, out_ND.dtype.element_ty), mask=inside)
