"""Linear layers: what is packed, and that a row's bits do not depend on the call it is in."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from agentrt.engine.model import linear
from agentrt.engine.model.linear import Kind, Linear, has_packing

KINDS: tuple[Kind, ...] = ("fp16", "fp32") if has_packing() else ("fp32",)


def weights(out_features: int, in_features: int, kind: Kind) -> Tensor:
    """Values that float16 holds, or does not."""
    weight_OD = torch.randn(out_features, in_features)
    return weight_OD.half().float() if kind == "fp16" else weight_OD


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out_features", "in_features"), [(320, 192), (61, 48), (80, 7), (1, 5)])
def test_rows_do_not_know_their_neighbours(out_features: int, in_features: int, kind: Kind) -> None:
    weight_OD, bias_O = weights(out_features, in_features, kind), torch.randn(out_features)
    layer = Linear(weight_OD, bias_O)
    assert layer.kind == kind
    x_ND = torch.randn(600, in_features)
    whole_NO = layer(x_ND)
    torch.testing.assert_close(whole_NO, F.linear(x_ND, weight_OD, bias_O), atol=1e-4, rtol=1e-4)
    for rows in (1, 2, 3, 5, 7, 11, 31, 32, 33, 64, 65, 513):
        for start in (0, 3):
            assert torch.equal(layer(x_ND[start : start + rows]), whole_NO[start : start + rows]), f"{rows} rows"


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind: Kind) -> None:
    assert Linear(weights(3, 4, kind))(torch.empty(0, 4)).shape == (0, 3)


@pytest.mark.skipif(not has_packing(), reason="this build of torch has no float16 product")
def test_what_float16_does_not_hold_is_not_packed() -> None:
    """bfloat16 loses nothing above 2^-17 and less than the smallest float16 below; float32 keeps its own."""
    mantissas = 1 + torch.arange(128) / 128
    every_bfloat16 = (mantissas * 2.0 ** torch.arange(-30, 16).unsqueeze(1)).clamp(max=65280.0)
    assert torch.equal(every_bfloat16.bfloat16().float(), every_bfloat16)
    assert Linear(every_bfloat16).kind == "fp16"
    assert Linear(every_bfloat16[13:]).kind == "fp16"
    assert torch.equal(every_bfloat16[13:].half().float(), every_bfloat16[13:])
    for value in (1 + 2.0**-12, 70_000.0, torch.nan, torch.inf):
        assert Linear(torch.tensor([[value, 1.0]])).kind == "fp32"


@pytest.mark.parametrize("kind", KINDS)
def test_loading_again_replaces_the_weights(kind: Kind) -> None:
    old_OD, new_OD, x_ND = weights(24, 16, kind), weights(24, 16, kind), torch.randn(5, 16)
    layer = Linear(old_OD, torch.randn(24))
    layer.load(new_OD)
    assert torch.equal(layer(x_ND), Linear(new_OD)(x_ND))


def test_free_rows_take_any_count() -> None:
    layer = Linear(torch.randn(24, 16), is_exact=False)
    assert layer.row_counts == ()
    assert layer(torch.randn(7, 16)).shape == (7, 24)


def test_rows_run_one_by_one_if_no_count_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that adds the row's number, as a library with another order for each row would."""

    def unsafe(x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        return x_ND @ weight_OD.T + torch.arange(len(x_ND)).unsqueeze(1)

    linear._probe.cache_clear()
    monkeypatch.setattr(linear.F, "linear", unsafe)
    try:
        layer = Linear(torch.randn(5, 4))
    finally:
        linear._probe.cache_clear()
    assert layer.row_counts == (1,)
    x_ND = torch.randn(3, 4)
    assert torch.equal(layer(x_ND)[2], layer(x_ND[2:])[0])
