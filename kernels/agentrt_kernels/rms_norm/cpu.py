"""RMS norm, compiled."""

from typing import Any

import numpy as np
from torch import Tensor

from agentrt_kernels.compiled import array, inner, ordered, reducing


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Each row divided by its root mean square, times `weight_D`."""
    out_ND = x_ND.new_empty(x_ND.shape)
    _rms_norm(array(x_ND), array(weight_D), np.float32(eps), array(out_ND))
    return out_ND


def add_rms_norm(x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Add `x_ND` to `residual_ND`, in place, and norm the sum."""
    out_ND = x_ND.new_empty(x_ND.shape)
    _add_rms_norm(array(x_ND), residual_ND.numpy(), array(weight_D), np.float32(eps), array(out_ND))
    return out_ND


@reducing()
def sum_of_squares(x_D: Any) -> Any:
    """In float32, in an order that depends on the length alone."""
    total = np.float32(0.0)
    for d in range(x_D.shape[0]):
        total += x_D[d] * x_D[d]
    return total


@inner()
def norm_row(x_D: Any, weight_D: Any, eps: Any, out_D: Any) -> None:
    """One row; `out_D` may be `x_D`."""
    size = x_D.shape[0]
    scale = np.float32(1.0) / np.sqrt(sum_of_squares(x_D) / np.float32(size) + eps)
    for d in range(size):
        out_D[d] = weight_D[d] * (x_D[d] * scale)


@ordered()
def _rms_norm(x_ND: Any, weight_D: Any, eps: Any, out_ND: Any) -> None:
    for n in range(x_ND.shape[0]):
        norm_row(x_ND[n], weight_D, eps, out_ND[n])


@ordered()
def _add_rms_norm(x_ND: Any, residual_ND: Any, weight_D: Any, eps: Any, out_ND: Any) -> None:
    for n in range(x_ND.shape[0]):
        for d in range(x_ND.shape[1]):
            residual_ND[n, d] += x_ND[n, d]
        norm_row(residual_ND[n], weight_D, eps, out_ND[n])
