"""Rotary positions and the write of KV on a GPU, fused with the norms of queries and keys."""

import triton
from torch import Tensor

from agentrt_kernels.pages import PageLayout
from agentrt_kernels.quantized.launch import scales_of
from agentrt_kernels.rotary.kernel import rotary_kernel


def rotary(
    qkv_NE: Tensor, cos_TR: Tensor, sin_TR: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_SP: Tensor,
    pool: Tensor, layout: PageLayout, layer: int, norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:  # fmt: skip
    """Norm (Qwen3) and turn the queries and keys of each row, write K and V to the row's page, and return `q_NHD`.

    The arguments are those of the reference. The pool may be of another type than `qkv_NE`, 8-bit ones included.
    """
    qkv_NE = qkv_NE.contiguous()
    rows, half = qkv_NE.shape[0], layout.head_dim // 2
    heads = qkv_NE.shape[1] // layout.head_dim - layout.parts * layout.kv_heads
    q_NHD = qkv_NE.new_empty(rows, heads, layout.head_dim)
    q_weight_D, k_weight_D, eps = norms if norms is not None else (qkv_NE, qkv_NE, 0.0)
    scales, largest = scales_of(pool)
    rotary_kernel[(rows, heads + layout.parts * layout.kv_heads)](
        qkv_NE, cos_TR, sin_TR, positions_N, table_of_N, tables_SP.contiguous(), q_weight_D, k_weight_D, eps, pool,
        scales, q_NHD, tables_SP.shape[1], layout.page_stride, layer * layout.layer_stride, layout.kv_stride,
        heads, layout.kv_heads, PAGE=layout.page_size, HALF=half,
        TURNED=cos_TR.shape[1], PARTS=layout.parts, BLOCK=triton.next_power_of_2(half),
        NORMED=norms is not None, LARGEST=largest, num_warps=1,
    )  # fmt: skip
    return q_NHD
