"""Muon: orthogonal steps, as large as AdamW's."""

import pytest
import torch

from agentrt.engine.speculate.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_singular_values_come_near_1_and_their_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrix)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    diagonal = u.T @ found @ v.T
    torch.testing.assert_close(diagonal, torch.diag(diagonal.diagonal()), atol=1e-4, rtol=0)
    assert (diagonal.diagonal()[s > 0.1 * s[0]] > 0.6).all()
    assert (diagonal.diagonal() < 1.3).all()


def test_the_first_step_by_hand() -> None:
    """Rate 0.1 and a matrix of 4 x 9: 0.1 * 0.2 * 3 times the orthogonal gradient, after a decay of 0.1 %."""
    start = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    weight, untouched = start.clone().requires_grad_(), torch.ones(2, 2, requires_grad=True)
    gradient = torch.randn(4, 9, generator=torch.Generator().manual_seed(2))
    weight.grad = gradient.clone()
    Muon([weight, untouched], 0.1).step()
    torch.testing.assert_close(weight.detach(), 0.999 * start - 0.06 * orthogonal(gradient), atol=1e-5, rtol=0)
    assert torch.equal(untouched, torch.ones(2, 2))
