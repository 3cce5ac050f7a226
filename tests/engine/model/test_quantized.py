"""Products in int8: they are as defined, near the exact ones, and no row knows its neighbours."""

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)

from agentrt.core.errors import UsageError
from agentrt.core.models import find_model
from agentrt.core.spec import EngineSpec
from agentrt.engine.local import _checked_precision
from agentrt.engine.model.config import load_config
from agentrt.engine.model.quantized import WIDTH, Precision, QuantizedLinear
from agentrt_kernels.matmul.reference import w8a8
from agentrt_kernels.quantized.reference import quantize_rows

SHAPES = [(320, 192), (61, 48), (80, 7), (1, 5)]


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_bits_are_those_of_the_definition(out_features: int, in_features: int) -> None:
    weight_OD, x_ND = torch.randn(out_features, in_features), torch.randn(64, in_features)
    out_NO = QuantizedLinear(weight_OD)(x_ND)
    assert torch.equal(out_NO, w8a8(x_ND, *quantize_rows(weight_OD)))
    bias_O, exact_NO = torch.randn(out_features), F.linear(x_ND, weight_OD)
    assert torch.equal(QuantizedLinear(weight_OD, bias_O)(x_ND), out_NO + bias_O)
    assert float((out_NO - exact_NO).norm() / exact_NO.norm()) < 0.02


def test_the_largest_sums_are_exact_and_wide_rows_are_added_up() -> None:
    """All 127 times 127: one less anywhere shows. And a row of two and a half parts."""
    weight_OD = torch.ones(3, WIDTH)
    weight_OD[1, 5], weight_OD[2, 9] = 126 / 127, 125 / 127
    sums_O = QuantizedLinear(weight_OD)(torch.ones(1, WIDTH))[0] * 127 * 127
    assert sums_O.round().tolist() == [127 * 127 * WIDTH, 127 * 127 * WIDTH - 127, 127 * 127 * WIDTH - 2 * 127]
    weight_OD, x_ND = torch.randn(24, WIDTH * 5 // 2), torch.randn(9, WIDTH * 5 // 2)
    torch.testing.assert_close(QuantizedLinear(weight_OD)(x_ND), w8a8(x_ND, *quantize_rows(weight_OD)))


@pytest.mark.parametrize("neighbour", [1e6, 1e-6, 0.0, torch.inf, torch.nan])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_an_outlier_beside_a_row_changes_no_bit_of_it(out_features: int, in_features: int, neighbour: float) -> None:
    layer, x_ND = QuantizedLinear(torch.randn(out_features, in_features)), torch.randn(66, in_features)
    alone_NO = torch.cat([layer(row_D[None]) for row_D in x_ND])
    for rows in (1, 2, 3, 5, 7, 11, 31, 32, 33, 64, 65):
        beside_ND = torch.cat([torch.full((1, in_features), neighbour), x_ND[:rows]])
        assert torch.equal(layer(beside_ND)[1:], alone_NO[:rows]), f"{rows} rows"


def test_rows_and_weights_of_zeros() -> None:
    layer = QuantizedLinear(torch.zeros(3, 4))
    assert torch.equal(layer(torch.randn(5, 4)), torch.zeros(5, 3))
    assert QuantizedLinear(torch.randn(3, 4))(torch.zeros(1, 4)).tolist() == [[0.0, 0.0, 0.0]]
    assert layer(torch.empty(0, 4)).shape == (0, 3)


def test_pages_that_leave_no_place_for_scales_are_refused() -> None:
    """Their scales lie behind the numbers, four bytes each, and are read as float32."""
    config, int8 = load_config(find_model("sprout")), Precision(kv="int8")
    odd = msgspec.structs.replace(config, num_kv_heads=1, head_dim=6)
    for page_size in (4, 16):
        _checked_precision("odd", odd, int8, EngineSpec(page_size=page_size))
    _checked_precision("sprout", config, int8, EngineSpec(page_size=1))
    with pytest.raises(UsageError, match=r"engine.kv=int8 needs an engine.page_size that is a multiple of 4 for odd"):
        _checked_precision("odd", odd, int8, EngineSpec(page_size=5))
