"""RMS norm, as a Triton kernel: a program is one row."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ND, residual_ND, weight_D, out_ND, eps, width,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With ADD, `residual_ND` becomes its sum with `x_ND`, and what was stored there is normed."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = tl.program_id(0).to(tl.int64) * width + columns
    x = tl.load(x_ND + places, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (x + tl.load(residual_ND + places, mask=inside, other=0.0).to(tl.float32)).to(
            residual_ND.dtype.element_ty
        )
        tl.store(residual_ND + places, total, mask=inside)
        x = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_D + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ND + places, (weight * (x * scale)).to(out_ND.dtype.element_ty), mask=inside)
