"""Linear layers: what is packed, and that a row's bits do not depend on the call it is in."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from agentrt.engine.model.linear import Linear, packed_type

TYPES = (torch.float16, torch.float32)


def weights(out_features: int, in_features: int, kind: torch.dtype) -> Tensor:
    """Values that float16 holds, or does not."""
    return torch.randn(out_features, in_features).to(kind).float()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(320, 192), (61, 48), (80, 7), (1, 5)])
def test_rows_do_not_know_their_neighbours(out_features: int, in_features: int, kind: torch.dtype) -> None:
    weight_OD, bias_O = weights(out_features, in_features, kind), torch.randn(out_features)
    assert packed_type([weight_OD]) == kind
    layer = Linear(weight_OD, bias_O)
    x_ND = torch.randn(600, in_features)
    whole_NO = layer(x_ND)
    torch.testing.assert_close(whole_NO, F.linear(x_ND, weight_OD, bias_O), atol=1e-4, rtol=1e-4)
    for rows in (1, 2, 3, 5, 7, 11, 31, 32, 33, 64, 65, 513):
        for start in (0, 3):
            assert torch.equal(layer(x_ND[start : start + rows]), whole_NO[start : start + rows]), f"{rows} rows"


@pytest.mark.parametrize("kind", TYPES)
def test_no_rows(kind: torch.dtype) -> None:
    assert Linear(weights(3, 4, kind))(torch.empty(0, 4)).shape == (0, 3)


def test_what_float16_does_not_hold_is_not_packed() -> None:
    """bfloat16 loses nothing above 2^-17 and less than the smallest float16 below; float32 keeps its own."""
    mantissas = 1 + torch.arange(128) / 128
    every_bfloat16 = (mantissas * 2.0 ** torch.arange(-30, 16).unsqueeze(1)).clamp(max=65280.0)
    assert torch.equal(every_bfloat16.bfloat16().float(), every_bfloat16)
    assert packed_type([every_bfloat16]) == torch.float16
    assert torch.equal(every_bfloat16[13:].half().float(), every_bfloat16[13:])
    for value in (1 + 2.0**-12, 70_000.0, torch.nan, torch.inf):
        assert packed_type([every_bfloat16, torch.tensor([[value, 1.0]])]) == torch.float32


def test_a_row_of_nan_stays_alone() -> None:
    weight_OD, x_ND = weights(40, 24, torch.float16), torch.randn(8, 24)
    expected_NO = Linear(weight_OD)(x_ND)
    x_ND[3] = torch.nan
    found_NO = Linear(weight_OD)(x_ND)
    assert found_NO[3].isnan().all()
    assert torch.equal(found_NO[[0, 1, 2, 4, 5, 6, 7]], expected_NO[[0, 1, 2, 4, 5, 6, 7]])
