"""RMS norm on a GPU. Sums are in float32 whatever the tensors hold."""

import torch
import triton
from torch import Tensor

from agentrt_kernels.rms_norm.kernel import rms_norm_kernel


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Each row divided by its root mean square, times `weight_D`."""
    return _launch(x_ND, x_ND, weight_D, eps, add=False)


def add_rms_norm(x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Add `x_ND` to `residual_ND`, in place, and norm the sum."""
    return _launch(x_ND, residual_ND, weight_D, eps, add=True)


def _launch(x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float, add: bool) -> Tensor:
    x_ND = x_ND.contiguous()
    out_ND = torch.empty_like(x_ND)
    width = x_ND.shape[-1]
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(x_ND.numel() // width,)](
        x_ND, residual_ND, weight_D, out_ND, eps, width, ADD=add, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
    )
    return out_ND
