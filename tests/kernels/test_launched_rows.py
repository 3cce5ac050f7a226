"""RMS norm, SwiGLU and GeGLU: the Triton kernels against their definitions, by the interpreter where there is no GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from agentrt_kernels.geglu import launch as geglu_launch
from agentrt_kernels.geglu import reference as geglu_reference
from agentrt_kernels.rms_norm import launch as rms_launch
from agentrt_kernels.rms_norm import reference as rms_reference
from agentrt_kernels.swiglu import launch as swiglu_launch
from agentrt_kernels.swiglu import reference as swiglu_reference

# The interpreter computes with numpy, which says so when a number becomes infinite; 1 / (1 + inf) is the 0 that is meant.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

SHAPES = [(1, 8), (3, 33), (2, 1025)]
TYPES = [(torch.float32, 1e-5), (torch.float16, 1e-3)]
if torch.cuda.is_available():
    TYPES += [(torch.bfloat16, 1e-2)]  # the interpreter cuts bfloat16 off where a GPU rounds


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize(("dtype", "close"), TYPES)
def test_rms_norm(device: str, rows: int, width: int, dtype: torch.dtype, close: float) -> None:
    x_ND = torch.randn(rows, width, device=device, dtype=dtype)
    weight_D = torch.randn(width, device=device, dtype=dtype)
    expected_ND = rms_reference.rms_norm(x_ND.float(), weight_D.float(), 1e-5)
    out_ND = rms_launch.rms_norm(x_ND, weight_D, 1e-5)
    assert out_ND.dtype == dtype
    torch.testing.assert_close(out_ND.float(), expected_ND, atol=close, rtol=close)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize(("dtype", "close"), TYPES)
def test_add_rms_norm_adds_in_place(device: str, rows: int, width: int, dtype: torch.dtype, close: float) -> None:
    x_ND, residual_ND = torch.randn(2, rows, width, device=device, dtype=dtype)
    weight_D = torch.randn(width, device=device, dtype=dtype)
    summed_ND = residual_ND + x_ND
    expected_ND = rms_reference.rms_norm(summed_ND.float(), weight_D.float(), 1e-5)
    out_ND = rms_launch.add_rms_norm(x_ND, residual_ND, weight_D, 1e-5)
    assert torch.equal(residual_ND, summed_ND)
    torch.testing.assert_close(out_ND.float(), expected_ND, atol=close, rtol=close)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize(("dtype", "close"), TYPES)
@pytest.mark.parametrize(
    ("launch", "reference"),
    [(swiglu_launch.swiglu, swiglu_reference.swiglu), (geglu_launch.geglu, geglu_reference.geglu)],
)
def test_gate(
    device: str, launch: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor],
    rows: int, width: int, dtype: torch.dtype, close: float,
) -> None:  # fmt: skip
    gate_up_NE = (torch.randn(rows, 2 * width, device=device) * 4).to(dtype)
    expected_NF = reference(gate_up_NE.float())
    torch.testing.assert_close(launch(gate_up_NE).float(), expected_NF, atol=close, rtol=close)


@pytest.mark.parametrize("launch", [swiglu_launch.swiglu, geglu_launch.geglu])
def test_extreme_gates(device: str, launch: Callable[[Tensor], Tensor]) -> None:
    gates_1E = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e10]])
    out_1E = launch(torch.cat([gates_1E, torch.ones(1, 5)], dim=1).to(device))
    assert out_1E.tolist() == [[0.0, 0.0, 0.0, 200.0, gates_1E[0, 4].item()]]
