"""Rows in 8 bits with a scale each, on a GPU."""

import torch
import triton
from torch import Tensor

from agentrt_kernels.quantized.kernel import quantize_rows_kernel
from agentrt_kernels.quantized.reference import LARGEST


def quantize_rows(x_ND: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """`(q_ND, scales_N)` with x = q * scale: the scale brings a row's largest magnitude to the type's largest."""
    x_ND = x_ND.contiguous()
    rows, width = x_ND.shape
    out_ND, scales_N = torch.empty_like(x_ND, dtype=dtype), x_ND.new_empty(rows, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    quantize_rows_kernel[(rows,)](
        x_ND, out_ND, scales_N, width, LARGEST=LARGEST[dtype], BLOCK=block, num_warps=min(max(block // 512, 1), 16)
    )
    return out_ND, scales_N


def scales_of(pool: Tensor) -> tuple[Tensor, float]:
    """A page pool's scales (the pool seen as float32) and its type's largest magnitude; 0 if it is not quantised."""
    largest = LARGEST.get(pool.dtype, 0.0)
    return (pool.view(torch.float32) if largest else pool), largest
