"""Rows in 8 bits and the products with them: the Triton kernels against their definitions."""

import pytest
import torch

from agentrt_kernels.matmul import launch, reference
from agentrt_kernels.quantized import launch as quantized_launch
from agentrt_kernels.quantized.reference import quantize_rows

SHAPES = [(1, 5, 33), (3, 70, 8), (17, 65, 300)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_quantize_rows_is_exact(device: str, dtype: torch.dtype) -> None:
    x_ND = torch.cat([torch.randn(5, 33), torch.randn(1, 33) * 1e-6, torch.zeros(1, 33)]).to(device)
    x_ND[3, 32], x_ND[4, 0] = torch.nan, -torch.inf
    q_ND, scales_N = quantized_launch.quantize_rows(x_ND, dtype)
    expected_ND, expected_N = quantize_rows(x_ND, dtype)
    numbers = [0, 1, 2, 5, 6]
    assert torch.equal(q_ND.float()[numbers], expected_ND.float()[numbers])
    assert torch.equal(scales_N[numbers], expected_N[numbers])
    assert scales_N[3:5].isnan().all()
    assert expected_N[3:5].isnan().all()


@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
def test_w8a16(device: str, rows: int, outputs: int, width: int) -> None:
    x_NI = torch.randn(rows, width, device=device)
    weight_OI, scales_O = quantize_rows(torch.randn(outputs, width, device=device))
    expected_NO = reference.w8a16(x_NI, weight_OI, scales_O)
    torch.testing.assert_close(launch.w8a16(x_NI, weight_OI, scales_O), expected_NO, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
def test_w8a8_sums_whole_numbers(device: str, rows: int, outputs: int, width: int) -> None:
    x_NI = torch.randn(rows, width, device=device)
    weight_OI, scales_O = quantize_rows(torch.randn(outputs, width, device=device))
    expected_NO = reference.w8a8(x_NI, weight_OI, scales_O)
    torch.testing.assert_close(launch.w8a8(x_NI, weight_OI, scales_O), expected_NO, atol=0, rtol=3e-7)
