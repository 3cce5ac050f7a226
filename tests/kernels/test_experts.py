"""Which experts a row takes and what they make of it: compiled and by Triton, against the definition."""

import pytest
import torch

from agentrt_kernels.experts import cpu, reference
from agentrt_kernels.experts.reference import Routing

ROUTINGS = [
    Routing(3),
    Routing(2, is_normalised=True),
    Routing(2, scale=2.5, groups=4, kept_groups=2),
    Routing(3, "sigmoid", is_normalised=True, scale=2.5, groups=3, kept_groups=2),
]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_compiled_choice_is_the_definition_s(routing: Routing) -> None:
    logits_NE = torch.randn(33, 12)
    bias_E = torch.randn(12) if routing.scores == "sigmoid" else None
    ids_NK, weights_NK = cpu.route(logits_NE, routing, bias_E)
    expected_NK, expected_weights_NK = reference.route(logits_NE, routing, bias_E)
    assert torch.equal(ids_NK, expected_NK)
    torch.testing.assert_close(weights_NK, expected_weights_NK, atol=1e-6, rtol=1e-6)
    if routing.is_normalised:
        torch.testing.assert_close(weights_NK.sum(1), torch.full((33,), routing.scale))
    alone = [cpu.route(logits_E.unsqueeze(0), routing, bias_E)[1] for logits_E in logits_NE]
    assert torch.equal(torch.cat(alone), weights_NK)


def test_of_equal_scores_the_lower_expert_is_taken() -> None:
    logits_NE = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0], [0.0] * 5])
    for op in (cpu.route, reference.route):
        assert op(logits_NE, Routing(3))[0].tolist() == [[1, 3, 0], [0, 1, 2]]
        grouped = op(logits_NE[1:, :4], Routing(2, groups=2, kept_groups=1))[0]
        assert grouped.tolist() == [[0, 1]]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_no_rows_choose_nothing(routing: Routing) -> None:
    for op in (cpu.route, reference.route):
        ids_NK, weights_NK = op(torch.empty(0, 12), routing)
        assert ids_NK.shape == weights_NK.shape == (0, routing.top_k)


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 4, 2), (37, 5, 3), (40, 3, 1), (3, 40, 8)])
def test_experts_by_one_product(device: str, rows: int, experts: int, top_k: int) -> None:
    """Few pairs and many for an expert, experts without any, sizes that fill no tile; last, rows that all choose alike."""
    launch = pytest.importorskip("agentrt_kernels.experts.launch")
    generator = torch.Generator().manual_seed(rows)
    x_ND = torch.randn(rows, 72, generator=generator)
    gate_up_EFD, down_EDI = (
        torch.randn(experts, *shape, generator=generator) * 0.2 for shape in ((2 * 40, 72), (72, 40))
    )
    logits_NE = torch.randn(1 if rows == 3 else rows, experts, generator=generator).expand(rows, -1)
    ids_NK, weights_NK = reference.route(logits_NE, Routing(top_k))
    expected_ND = reference.expert_mlp(x_ND, ids_NK, weights_NK, gate_up_EFD, down_EDI)
    there = [tensor.to(device) for tensor in (x_ND, ids_NK, weights_NK, gate_up_EFD, down_EDI)]
    torch.testing.assert_close(launch.expert_mlp(*there).cpu(), expected_ND, atol=1e-5, rtol=1e-5)
