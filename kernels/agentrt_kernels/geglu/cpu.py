"""GeGLU, compiled."""

from typing import Any

import numpy as np
from torch import Tensor

from agentrt_kernels.compiled import array, inner, ordered, sigmoid32, spread


def geglu(gate_up_NE: Tensor) -> Tensor:
    """gelu(gate) * up, gelu in its tanh form; a row of `gate_up_NE` is the gate and then, as long again, up."""
    out_NF = gate_up_NE.new_empty(gate_up_NE.shape[0], gate_up_NE.shape[1] // 2)
    spread(_geglu, out_NF.shape[0], 1.5 * out_NF.numel(), array(gate_up_NE), array(out_NF))
    return out_NF


@ordered()
def _geglu(first: int, last: int, gate_up_NE: Any, out_NF: Any) -> None:
    for n in range(first, last):
        geglu_row(gate_up_NE[n], out_NF[n])


@inner()
def geglu_row(gate_up_E: Any, out_F: Any) -> None:
    """One row."""
    width = out_F.shape[0]
    for f in range(width):
        gate = gate_up_E[f]
        # (1 + tanh(y)) / 2 is the sigmoid of 2y; 2 * sqrt(2 / pi) = 1.5957691
        bent = np.float32(1.5957691216057308) * (gate + np.float32(0.044715) * gate * gate * gate)
        out_F[f] = gate * sigmoid32(bent) * gate_up_E[width + f]
