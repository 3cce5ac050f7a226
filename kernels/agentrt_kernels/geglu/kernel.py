"""GeGLU, as a Triton kernel: a program is a stretch of one row."""

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def geglu_kernel(gate_up_NE, out_NF, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up_NE + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_NE + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh(y)) / 2 is the sigmoid of 2y; 2 * sqrt(2 / pi) = 1.5957691
    bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out_NF + row * width + columns, (gate * tl.sigmoid(bent) * up).to(out_NF.dtype.element_ty), mask=inside)
