"""The packed product: against its definition, term by term in order, and its transposition."""

import numpy as np
import pytest
import torch
from numba import njit

from agentrt_kernels.product import cpu, reference
from agentrt_kernels.product.tile import transpose


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 8), (33, 1), (130, 576)])
@pytest.mark.parametrize("rows", [1, 6, 7, 50])
def test_product(rows: int, outputs: int, inputs: int, kind: torch.dtype) -> None:
    x_NI, weight_OI = torch.randn(rows, inputs), torch.randn(outputs, inputs).to(kind).float()
    found_NO = cpu.product(x_NI, cpu.pack(weight_OI, kind), outputs)
    torch.testing.assert_close(found_NO, reference.product(x_NI, weight_OI), atol=1e-4, rtol=1e-4)


def test_terms_are_taken_in_order() -> None:
    """Whole numbers and powers of two, of which another order of the same terms gives another sum."""
    x_NI, weight_OI = torch.tensor([[2.0**24, 1.0, 1.0, -(2.0**24)]]), torch.ones(16, 4)
    assert cpu.product(x_NI, cpu.pack(weight_OI, torch.float16), 16).tolist() == [[0.0] * 16]
    x_NI = torch.tensor([[1.0, 1.0, 2.0**24, -(2.0**24)]])
    assert cpu.product(x_NI, cpu.pack(weight_OI, torch.float16), 16).tolist() == [[2.0] * 16]


def test_every_float16_becomes_its_float32() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    halves = torch.from_numpy(bits.view(np.float16).copy())
    found_1O = cpu.product(torch.ones(1, 1), cpu.pack(halves.unsqueeze(1), torch.float16), len(bits))
    expected_O = halves.float() + 0.0  # a sum begins at 0, so -0 becomes 0
    assert torch.equal(found_1O[0].nan_to_num(nan=7.0), expected_O.nan_to_num(nan=7.0))
    assert torch.equal(found_1O[0].isnan(), expected_O.isnan())


def test_transpose() -> None:
    @njit
    def turn(x: object, out: object) -> None:
        transpose(x, 3, 10, out, 5, 9)

    x, out = np.arange(90, dtype=np.float32), np.zeros(90, dtype=np.float32)
    turn(x, out)
    rows = x[3:83].reshape(8, 10)[:, :8]
    assert (out[5:77].reshape(8, 9)[:, :8] == rows.T).all()
