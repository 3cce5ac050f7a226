"""SwiGLU on a GPU, in float32 whatever the tensors hold."""

import triton
from torch import Tensor

from agentrt_kernels.swiglu.kernel import BLOCK, swiglu_kernel


def swiglu(gate_up_NE: Tensor) -> Tensor:
    """silu(gate) * up, where a row of `gate_up_NE` is the gate and then, as long again, up."""
    gate_up_NE = gate_up_NE.contiguous()
    rows, width = gate_up_NE.shape[0], gate_up_NE.shape[1] // 2
    out_NF = gate_up_NE.new_empty(rows, width)
    swiglu_kernel[(rows, triton.cdiv(width, BLOCK))](gate_up_NE, out_NF, width, BLOCK=BLOCK)
    return out_NF
