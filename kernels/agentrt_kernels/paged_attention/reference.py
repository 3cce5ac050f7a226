"""Attention over keys and values in pages: the definition."""

import torch
from torch import Tensor

from agentrt_kernels.pages import PageLayout


def paged_attention(
    q_NHD: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_SP: Tensor,
    pool: Tensor, layout: PageLayout, layer: int, window: int = 0, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Each row attends the keys 0..i of its sequence, i its position (the last `window` of them, if not 0); `out_NHD`.

    A `cap` that is not 0 bounds the scores smoothly: s becomes cap * tanh(s / cap) (Gemma 2).

    The keys and values are in the pages already, those of the rows themselves too, maybe of fewer bits than `q_NHD`. Query
    head h uses KV head h // (H // kv_heads). Where a layout has one part, the values are the keys. Pages wholly before
    the window are not looked at: their entries may be -1.
    """
    out_NHD = torch.empty_like(q_NHD)
    view = pool.view(-1, layout.num_layers, layout.parts, layout.kv_heads, layout.page_size, layout.head_dim)
    for table in sorted(set(table_of_N.tolist())):
        rows_R = (table_of_N == table).nonzero().squeeze(1)
        positions_R = positions_N[rows_R]
        stop = int(positions_R.max()) + 1
        first_page = max(0, int(positions_R.min()) - window + 1) // layout.page_size if window else 0
        start = first_page * layout.page_size
        pages_P = tables_SP[table, first_page : -(-stop // layout.page_size)].long()
        kv_2KTD = view[pages_P, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : stop - start].expand(2, -1, -1, -1)
        out_NHD[rows_R] = _attend(q_NHD[rows_R], kv_2KTD.to(q_NHD.dtype), positions_R - start, window, cap)
    return out_NHD


def _attend(q_RHD: Tensor, kv_2KTD: Tensor, positions_R: Tensor, window: int, cap: float) -> Tensor:
    k_HTD, v_HTD = kv_2KTD.repeat_interleave(q_RHD.shape[1] // kv_2KTD.shape[1], dim=1)
    distance_RT = positions_R.unsqueeze(1) - torch.arange(k_HTD.shape[1], device=q_RHD.device)
    hidden_RT = (distance_RT < 0) | (distance_RT >= window) if window else distance_RT < 0
    scores_HRT = q_RHD.transpose(0, 1) @ k_HTD.transpose(1, 2) * q_RHD.shape[2] ** -0.5
    if cap:
        scores_HRT = cap * torch.tanh(scores_HRT / cap)
    weights_HRT = scores_HRT.masked_fill(hidden_RT, -torch.inf).softmax(-1)
    out_HRD: Tensor = weights_HRT @ v_HTD
    return out_HRD.transpose(0, 1)
