"""Rows in 8 bits with a scale each, and pages of them: the definition."""

import torch
from torch import Tensor

from agentrt_kernels.pages import PageLayout

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
"""The largest magnitude that is used of each 8-bit type; a type that is not here is stored as it is."""
SCALE_SIZE = 4
"""Elements of 8 bits that one float32 scale takes."""


def quantize_rows(x_ND: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """`(q_ND, scales_N)` with x = q * scale: the scale brings a row's largest magnitude to the type's largest.

    The scale of a row that holds NaN or infinity is NaN, which shows in everything that is made of it: no int8 says so.
    """
    peaks_N = x_ND.float().abs().amax(dim=-1)
    scales_N = torch.where(peaks_N > 0, peaks_N / LARGEST[dtype], 1.0)
    scales_N = scales_N.masked_fill(~peaks_N.isfinite(), torch.nan)
    scaled_ND = x_ND.float() / scales_N.unsqueeze(-1)
    return (scaled_ND.round() if dtype == torch.int8 else scaled_ND).to(dtype), scales_N


def dequantized_pool(pool: Tensor, layout: PageLayout) -> tuple[Tensor, PageLayout]:
    """The same pages in float32, and their layout."""
    blocks_XE = pool.view(-1, layout.kv_stride)
    values = layout.kv_heads * layout.page_size * layout.head_dim
    scales_XT = blocks_XE[:, values:].contiguous().view(torch.float32)
    values_XTD = blocks_XE[:, :values].float().view(*scales_XT.shape, layout.head_dim)
    return (values_XTD * scales_XT.unsqueeze(-1)).flatten(), layout._replace(scale_size=0)
