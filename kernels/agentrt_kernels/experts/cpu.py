"""Which experts a row takes, compiled: a row's choice and weights have the same bits whatever stands beside it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrt_kernels.compiled import array, exp32, ordered, sigmoid32
from agentrt_kernels.experts.reference import Routing


def route(logits_NE: Tensor, routing: Routing, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`(ids_NK, weights_NK)`, as the reference has them."""
    rows, experts = logits_NE.shape
    ids_NK = torch.empty(rows, routing.top_k, dtype=torch.int64)
    weights_NK = torch.empty(rows, routing.top_k)
    _route(
        array(logits_NE), array(torch.zeros(experts) if bias_E is None else bias_E), routing.scores == "softmax",
        routing.is_normalised, np.float32(routing.scale), routing.groups, routing.kept_groups, array(ids_NK),
        array(weights_NK),
    )  # fmt: skip
    return ids_NK, weights_NK


@ordered()
def _route(
    logits_NE: Any, bias_E: Any, is_softmax: bool, is_normalised: bool, scale: Any, groups: int, kept_groups: int,
    ids_NK: Any, weights_NK: Any,
) -> None:  # fmt: skip
    experts, top_k = logits_NE.shape[1], ids_NK.shape[1]
    scores_E, choice_E = np.empty(experts, dtype=np.float32), np.empty(experts, dtype=np.float32)
    for n in range(logits_NE.shape[0]):
        if is_softmax:
            _softmax(logits_NE[n], scores_E)
        else:
            for e in range(experts):
                scores_E[e] = sigmoid32(logits_NE[n, e])
        for e in range(experts):
            choice_E[e] = scores_E[e] + bias_E[e]
        if groups > 1:
            _keep_groups(choice_E, groups, kept_groups, is_softmax)
        total = np.float32(0.0)
        for k in range(top_k):
            best = _best(choice_E)
            ids_NK[n, k], weights_NK[n, k] = best, scores_E[best]
            choice_E[best] = np.float32(-np.inf)
            total += scores_E[best]
        total = total + np.float32(1e-20) if is_normalised else np.float32(1.0)
        for k in range(top_k):
            weights_NK[n, k] = weights_NK[n, k] / total * scale


@ordered()
def _softmax(logits_E: Any, scores_E: Any) -> None:
    peak, total = logits_E.max(), np.float32(0.0)
    for e in range(logits_E.shape[0]):
        scores_E[e] = exp32(logits_E[e] - peak)
        total += scores_E[e]
    for e in range(logits_E.shape[0]):
        scores_E[e] /= total


@ordered()
def _keep_groups(choice_E: Any, groups: int, kept_groups: int, is_softmax: bool) -> None:
    """Leave nothing to choose from groups that are not among the best."""
    size, best_G = choice_E.shape[0] // groups, np.empty(groups, dtype=np.float32)
    for g in range(groups):
        first = second = np.float32(-np.inf)
        for e in range(g * size, (g + 1) * size):
            if choice_E[e] > first:
                first, second = choice_E[e], first
            elif choice_E[e] > second:
                second = choice_E[e]
        best_G[g] = first if is_softmax else first + second
    for _ in range(kept_groups):
        best_G[_best(best_G)] = np.float32(-np.inf)
    for g in range(groups):
        if best_G[g] > -np.inf:
            choice_E[g * size : (g + 1) * size] = np.float32(-np.inf)


@ordered()
def _best(x_E: Any) -> Any:
    """The first place of the largest number."""
    best = 0
    for e in range(1, x_E.shape[0]):
        if x_E[e] > x_E[best]:
            best = e
    return best
