"""Which drafted ids stand, on a GPU: nothing comes back to the host."""

import torch
from torch import Tensor

from agentrt_kernels.verify.kernel import verify_kernel
from agentrt_kernels.verify.reference import Verified


def verify(drafted_N: Tensor, sampled_N: Tensor, parents_N: Tensor, starts_T: Tensor, longest: int) -> Verified:
    """As the reference has it. All but the sampled and drafted ids (int64) are int32."""
    sequences = len(starts_T) - 1
    counts_S = torch.empty(sequences, dtype=torch.int32, device=sampled_N.device)
    nodes_SW = torch.full((sequences, longest), -1, dtype=torch.int32, device=sampled_N.device)
    if sequences:
        verify_kernel[(sequences,)](drafted_N, sampled_N, parents_N, starts_T, counts_S, nodes_SW, longest, num_warps=1)
    return Verified(counts_S, nodes_SW)
