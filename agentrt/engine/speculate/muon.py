"""Muon: an optimizer for matrices, whose steps are momentum made orthogonal (Jordan et al. 2024).

    M <- mu M + (1 - mu) G,   step = rate * 0.2 sqrt(max(rows, columns)) * orthogonal(mu M + (1 - mu) G)

The factor makes steps as large as AdamW's, so both go by one learning rate (Liu et al. 2025). torch's own iterates in
bfloat16, which takes a CPU without such instructions three times as long as a whole step of a draft head.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Of the polynomial that brings singular values near 1 in five rounds."""
ROUNDS = 5
MOMENTUM = 0.95
DECAY = 0.01
"""Of a weight, in each step, times the learning rate."""


class Muon(torch.optim.Optimizer):
    """Over matrices only."""

    def __init__(self, matrices: Iterable[Tensor], rate: float) -> None:
        super().__init__(matrices, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step down the gradients; `closure` is not looked at."""
        for group in self.param_groups:
            rate = group["lr"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                ahead = matrix.grad.lerp(momentum, MOMENTUM)
                matrix.mul_(1 - rate * DECAY)
                matrix.sub_(orthogonal(ahead), alpha=rate * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """A matrix of the same singular vectors, with singular values between 0.7 and 1.2 but where they were next to 0."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = (matrix.T if is_tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x
