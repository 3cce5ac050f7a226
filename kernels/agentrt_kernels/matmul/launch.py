"""Products with weights in 8 bits, on a GPU."""

import torch
import triton
from torch import Tensor

from agentrt_kernels.matmul.kernel import matmul_kernel
from agentrt_kernels.quantized.launch import quantize_rows

BLOCK_O, BLOCK_I = 64, 128


def w8a16(x_NI: Tensor, weight_OI: Tensor, scales_O: Tensor) -> Tensor:
    """`x @ (weight * scale).T`, summed in float32, in the type of `x`."""
    return _launch(x_NI.contiguous(), weight_OI, scales_O, scales_O, x_NI.dtype)


def w8a8(x_NI: Tensor, weight_OI: Tensor, scales_O: Tensor) -> Tensor:
    """`x @ (weight * scale).T` with the rows of `x` rounded to int8, in the type of `x`."""
    q_NI, x_scales_N = quantize_rows(x_NI, torch.int8)
    return _launch(q_NI, weight_OI, x_scales_N, scales_O, x_NI.dtype)


def _launch(x_NI: Tensor, weight_OI: Tensor, x_scales_N: Tensor, scales_O: Tensor, dtype: torch.dtype) -> Tensor:
    rows, width = x_NI.shape
    outputs = weight_OI.shape[0]
    out_NO = x_NI.new_empty(rows, outputs, dtype=dtype)
    block_n = min(max(triton.next_power_of_2(rows), 16), 128)
    grid = (triton.cdiv(rows, block_n), triton.cdiv(outputs, BLOCK_O))
    matmul_kernel[grid](
        x_NI, weight_OI, x_scales_N, scales_O, out_NO, rows, width, outputs, WHOLE=x_NI.dtype == torch.int8,
        BLOCK_N=block_n, BLOCK_O=BLOCK_O, BLOCK_I=BLOCK_I, num_warps=8 if block_n > 64 else 4, num_stages=3,
    )  # fmt: skip
    return out_NO
