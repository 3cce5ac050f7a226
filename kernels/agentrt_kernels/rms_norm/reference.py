"""RMS norm: the definition."""

import torch
from torch import Tensor


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Each row divided by its root mean square, times `weight_D`."""
    return weight_D * (x_ND * torch.rsqrt(x_ND.pow(2).mean(-1, keepdim=True) + eps))


def add_rms_norm(x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Add `x_ND` to `residual_ND`, in place, and norm the sum."""
    residual_ND += x_ND
    return rms_norm(residual_ND, weight_D, eps)
