"""SwiGLU: the definition."""

import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor


def swiglu(gate_up_NE: Tensor) -> Tensor:
    """silu(gate) * up, where a row of `gate_up_NE` is the gate and then, as long again, up."""
    gate_NF, up_NF = gate_up_NE.chunk(2, dim=-1)
    return F.silu(gate_NF) * up_NF
