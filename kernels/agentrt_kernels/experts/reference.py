"""Which experts a row takes, and what they make of it: the definition.

Suffixes: E experts, K experts a row takes, F twice the inner width I (gate and up), D the hidden size.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor


class Routing(NamedTuple):
    """How rows choose experts: the `top_k` of highest score, among the best groups of experts if there are groups."""

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Of the router's logits."""
    is_normalised: bool = False
    """A row's weights are divided by their sum."""
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    """Groups that a row may choose from: those with the highest best score (softmax) or sum of the two best (sigmoid)."""


def route(logits_NE: Tensor, routing: Routing, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`(ids_NK, weights_NK)`: each row's experts by falling score, of equal ones the lower id, and their weights.

    Logits are float32, so are the weights; ids are int64. `bias_E` counts for the choice and not for the weight.
    """
    is_softmax = routing.scores == "softmax"
    scores_NE = logits_NE.softmax(-1) if is_softmax else logits_NE.sigmoid()
    choice_NE = scores_NE if bias_E is None else scores_NE + bias_E
    if routing.groups > 1:
        of_group_NGe = choice_NE.view(len(choice_NE), routing.groups, choice_NE.shape[1] // routing.groups)
        best_NG = of_group_NGe.amax(-1) if is_softmax else of_group_NGe.topk(2).values.sum(-1)
        order_NG = best_NG.sort(dim=-1, descending=True, stable=True).indices
        lost_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter(1, order_NG[:, : routing.kept_groups], False)
        choice_NE = of_group_NGe.masked_fill(lost_NG.unsqueeze(-1), -torch.inf).flatten(1)
    ids_NK = choice_NE.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights_NK = scores_NE.gather(1, ids_NK)
    if routing.is_normalised:
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
    return ids_NK, weights_NK * routing.scale


def expert_mlp(x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor, gate_up_EFD: Tensor, down_EDI: Tensor) -> Tensor:
    """`out_ND`: of each row, the weighted sum over its experts e of `down[e] @ (silu(gate[e] @ x) * (up[e] @ x))`."""
    out_ND = torch.zeros_like(x_ND)
    for expert in sorted(set(ids_NK.flatten().tolist())):
        rows_R, places_R = (ids_NK == expert).nonzero(as_tuple=True)
        gate_RI, up_RI = F.linear(x_ND[rows_R], gate_up_EFD[expert]).chunk(2, dim=-1)
        y_RD = F.linear(F.silu(gate_RI) * up_RI, down_EDI[expert])
        out_ND.index_add_(0, rows_R, (y_RD * weights_NK[rows_R, places_R].unsqueeze(1)).to(x_ND.dtype))
    return out_ND
