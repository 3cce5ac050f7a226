"""RMS norm, SwiGLU and GeGLU: the compiled operations against their definitions, and rows alone against rows together."""

import pytest
import torch

from agentrt_kernels.geglu import cpu as geglu_cpu
from agentrt_kernels.geglu import reference as geglu_reference
from agentrt_kernels.rms_norm import cpu as rms_cpu
from agentrt_kernels.rms_norm import reference as rms_reference
from agentrt_kernels.swiglu import cpu as swiglu_cpu
from agentrt_kernels.swiglu import reference as swiglu_reference

SHAPES = [(1, 8), (3, 33), (7, 192), (33, 576)]


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm(rows: int, width: int) -> None:
    x_ND, weight_D = torch.randn(rows, width), torch.randn(width)
    expected = rms_reference.rms_norm(x_ND, weight_D, 1e-5)
    torch.testing.assert_close(rms_cpu.rms_norm(x_ND, weight_D, 1e-5), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_add_rms_norm_adds_in_place(rows: int, width: int) -> None:
    x_ND, residual_ND, weight_D = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    expected_residual = residual_ND.clone()
    expected = rms_reference.add_rms_norm(x_ND, expected_residual, weight_D, 1e-5)
    out_ND = rms_cpu.add_rms_norm(x_ND, residual_ND, weight_D, 1e-5)
    torch.testing.assert_close(out_ND, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(residual_ND, expected_residual, atol=0, rtol=0)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_swiglu(rows: int, width: int) -> None:
    gate_up_NE = torch.randn(rows, 2 * width) * 4
    expected = swiglu_reference.swiglu(gate_up_NE)
    torch.testing.assert_close(swiglu_cpu.swiglu(gate_up_NE), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_geglu(rows: int, width: int) -> None:
    gate_up_NE = torch.randn(rows, 2 * width) * 4
    expected = geglu_reference.geglu(gate_up_NE)
    torch.testing.assert_close(geglu_cpu.geglu(gate_up_NE), expected, atol=1e-5, rtol=1e-5)


def test_geglu_of_extreme_gates() -> None:
    gates = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e10]])
    out = geglu_cpu.geglu(torch.cat([gates, torch.ones(1, 5)], dim=1))
    assert out.tolist() == [[0.0, 0.0, 0.0, 200.0, gates[0, 4].item()]]


def test_swiglu_of_extreme_gates() -> None:
    gates = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e30]])
    out = swiglu_cpu.swiglu(torch.cat([gates, torch.ones(1, 5)], dim=1))
    assert out.tolist() == [[0.0, 0.0, 0.0, 200.0, gates[0, 4].item()]]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 31, 33])
def test_rows_do_not_know_their_neighbours(rows: int) -> None:
    x_ND, weight_D = torch.randn(64, 198), torch.randn(198)
    for start in (0, 5):
        part_ND = x_ND[start : start + rows].clone()
        assert torch.equal(
            rms_cpu.rms_norm(part_ND, weight_D, 1e-6), rms_cpu.rms_norm(x_ND, weight_D, 1e-6)[start : start + rows]
        )
        assert torch.equal(swiglu_cpu.swiglu(part_ND), swiglu_cpu.swiglu(x_ND)[start : start + rows])
        assert torch.equal(geglu_cpu.geglu(part_ND), geglu_cpu.geglu(x_ND)[start : start + rows])
