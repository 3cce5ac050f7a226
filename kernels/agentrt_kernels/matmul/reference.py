"""Products with weights in 8 bits, a float32 scale a row of the weight: the definition.

`w8a16` keeps the activations as they are; `w8a8` rounds each of their rows to 8 bits with a scale of its own, and sums
whole numbers, so its sum is exact. Weights come from `quantized.quantize_rows`.
"""

import torch
from torch import Tensor

from agentrt_kernels.quantized.reference import quantize_rows


def w8a16(x_NI: Tensor, weight_OI: Tensor, scales_O: Tensor) -> Tensor:
    """`x @ (weight * scale).T`, summed in float32, in the type of `x`."""
    out_NO = x_NI.float() @ weight_OI.float().T * scales_O
    return out_NO.to(x_NI.dtype)


def w8a8(x_NI: Tensor, weight_OI: Tensor, scales_O: Tensor) -> Tensor:
    """`x @ (weight * scale).T` with the rows of `x` rounded to int8, in the type of `x`."""
    q_NI, scales_N = quantize_rows(x_NI, torch.int8)
    sums_NO = (q_NI.double() @ weight_OI.double().T).float()  # exact: far below 2^53
    return (sums_NO * scales_N.unsqueeze(1) * scales_O).to(x_NI.dtype)
