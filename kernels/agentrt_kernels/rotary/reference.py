"""Rotary positions, and the write of keys and values into their pages: the definition."""

import torch
from torch import Tensor

from agentrt_kernels.pages import PageLayout
from agentrt_kernels.rms_norm.reference import rms_norm


def rotary(
    qkv_NE: Tensor, cos_TR: Tensor, sin_TR: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_SP: Tensor,
    pool: Tensor, layout: PageLayout, layer: int, norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:  # fmt: skip
    """Norm (Qwen3) and turn the queries and keys of each row, write K and V to the row's page, and return `q_NHD`.

    A row of `qkv_NE` is the heads' queries, keys, values; no values where a layout has one part. `cos_TR` and `sin_TR` are by
    position and by the first R dimensions of a head's first half; those of its second half turn by the same angles, and
    the rest of both stays. `norms` is the weight of the queries' and the keys' RMS norm and its epsilon. Of a pool of
    float16, what that cannot hold becomes NaN there, which is seen in every row that attends it.
    """
    kv_heads, head_dim = layout.kv_heads, layout.head_dim
    heads_NGD = qkv_NE.view(qkv_NE.shape[0], -1, head_dim)
    sizes = [heads_NGD.shape[1] - layout.parts * kv_heads, kv_heads, (layout.parts - 1) * kv_heads]
    q_NHD, k_NKD, v_NKD = torch.split(heads_NGD, sizes, dim=1)
    if norms is not None:
        q_NHD, k_NKD = rms_norm(q_NHD, norms[0], norms[2]), rms_norm(k_NKD, norms[1], norms[2])
    cos_N1R, sin_N1R = cos_TR[positions_N].unsqueeze(1), sin_TR[positions_N].unsqueeze(1)
    pages_N = tables_SP[table_of_N.long(), positions_N // layout.page_size].long()
    view = pool.view(-1, layout.num_layers, layout.parts, kv_heads, layout.page_size, head_dim)
    view[pages_N, layer, 0, :, positions_N % layout.page_size] = _rounded(_turn(k_NKD, cos_N1R, sin_N1R), pool.dtype)
    if layout.parts == 2:
        view[pages_N, layer, 1, :, positions_N % layout.page_size] = _rounded(v_NKD, pool.dtype)
    return _turn(q_NHD, cos_N1R, sin_N1R)


def _rounded(x_NKD: Tensor, dtype: torch.dtype) -> Tensor:
    rounded_NKD = x_NKD.to(dtype)
    return rounded_NKD.masked_fill(rounded_NKD.isinf(), torch.nan) if dtype == torch.float16 else rounded_NKD


def _turn(x_NGD: Tensor, cos_N1R: Tensor, sin_N1R: Tensor) -> Tensor:
    half, count = x_NGD.shape[-1] // 2, cos_N1R.shape[-1]
    first, second = x_NGD[..., :count], x_NGD[..., half : half + count]
    turned = x_NGD.clone()
    turned[..., :count] = first * cos_N1R - second * sin_N1R
    turned[..., half : half + count] = second * cos_N1R + first * sin_N1R
    return turned
