"""SwiGLU, compiled."""

from typing import Any

from torch import Tensor

from agentrt_kernels.compiled import array, inner, ordered, sigmoid32, spread


def swiglu(gate_up_NE: Tensor) -> Tensor:
    """silu(gate) * up, where a row of `gate_up_NE` is the gate and then, as long again, up."""
    out_NF = gate_up_NE.new_empty(gate_up_NE.shape[0], gate_up_NE.shape[1] // 2)
    spread(_swiglu, out_NF.shape[0], 1.0 * out_NF.numel(), array(gate_up_NE), array(out_NF))
    return out_NF


@ordered()
def _swiglu(first: int, last: int, gate_up_NE: Any, out_NF: Any) -> None:
    for n in range(first, last):
        swiglu_row(gate_up_NE[n], out_NF[n])


@inner()
def swiglu_row(gate_up_E: Any, out_F: Any) -> None:
    """One row."""
    width = out_F.shape[0]
    for f in range(width):
        gate = gate_up_E[f]
        out_F[f] = gate * sigmoid32(gate) * gate_up_E[width + f]
