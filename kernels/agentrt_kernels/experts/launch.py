"""Which experts a row takes, and what they make of it, on a GPU. Nothing comes back to the host."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from agentrt_kernels.experts.kernel import grouped_matmul_kernel
from agentrt_kernels.experts.reference import route
from agentrt_kernels.swiglu.launch import swiglu

__all__ = ["expert_mlp", "route"]

BLOCK_O, BLOCK_I = 64, 64


class Spread(NamedTuple):
    """How pairs of a row and an expert are spread over the experts, on the device. P counts pairs, sorted by expert."""

    order_P: Tensor
    """The pairs' places before they were sorted."""
    starts_E: Tensor
    tile_ends_E: Tensor
    block_p: int
    tiles: int
    """At most."""


def expert_mlp(x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor, gate_up_EFD: Tensor, down_EDI: Tensor) -> Tensor:
    """`out_ND`, as the reference has it."""
    rows, top_k = ids_NK.shape
    spread = _spread(ids_NK, gate_up_EFD.shape[0])
    hidden_PF = _grouped_matmul(x_ND.contiguous(), spread.order_P // top_k, gate_up_EFD, spread)
    places_P = torch.arange(rows * top_k, device=x_ND.device)
    y_PD = _grouped_matmul(swiglu(hidden_PF), places_P, down_EDI, spread)
    place_of_P = torch.empty_like(places_P).scatter_(0, spread.order_P, places_P)
    y_NKD = y_PD[place_of_P].view(rows, top_k, -1)
    return (y_NKD.float() * weights_NK.unsqueeze(-1)).sum(1).to(x_ND.dtype)


def _spread(ids_NK: Tensor, experts: int) -> Spread:
    ids_P = ids_NK.flatten()
    block_p = min(max(triton.next_power_of_2(triton.cdiv(len(ids_P), experts)), 16), 64)
    counts_E = (ids_P.unsqueeze(1) == torch.arange(experts, device=ids_P.device)).sum(0)
    starts_E = torch.zeros(experts + 1, dtype=torch.int32, device=ids_P.device)
    starts_E[1:] = counts_E.cumsum(0)
    tile_ends_E = ((counts_E + block_p - 1) // block_p).cumsum(0).to(torch.int32)
    tiles = len(ids_P) // block_p + min(experts, len(ids_P))
    return Spread(ids_P.argsort(stable=True), starts_E, tile_ends_E, block_p, tiles)


def _grouped_matmul(x_RI: Tensor, rows_P: Tensor, weight_EOI: Tensor, spread: Spread) -> Tensor:
    """`out_PO`: each pair's row of `x_RI` times its expert's matrix."""
    experts, outputs, width = weight_EOI.shape
    out_PO = x_RI.new_empty(len(rows_P), outputs)
    if spread.tiles:
        grouped_matmul_kernel[(spread.tiles, triton.cdiv(outputs, BLOCK_O))](
            x_RI, rows_P, weight_EOI, spread.starts_E, spread.tile_ends_E, out_PO, experts, width, outputs,
            BLOCK_E=triton.next_power_of_2(experts), BLOCK_P=spread.block_p, BLOCK_O=BLOCK_O, BLOCK_I=BLOCK_I,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return out_PO
