"""GeGLU: the definition."""

import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor


def geglu(gate_up_NE: Tensor) -> Tensor:
    """gelu(gate) * up, gelu in its tanh form; a row of `gate_up_NE` is the gate and then, as long again, up."""
    gate_NF, up_NF = gate_up_NE.chunk(2, dim=-1)
    return F.gelu(gate_NF, approximate="tanh") * up_NF
