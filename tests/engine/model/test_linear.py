"""Linear layers at safe row counts: a row's bits do not depend on the call it is in."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from agentrt.engine.model import linear
from agentrt.engine.model.linear import Linear


@pytest.mark.parametrize(("out_features", "in_features"), [(320, 192), (61, 48), (80, 7), (1, 5)])
def test_rows_do_not_know_their_neighbours(out_features: int, in_features: int) -> None:
    layer = Linear(torch.randn(out_features, in_features), torch.randn(out_features))
    x_ND = torch.randn(600, in_features)
    whole_NO = layer(x_ND)
    torch.testing.assert_close(whole_NO, F.linear(x_ND, layer.weight_OD, layer.bias_O), atol=1e-4, rtol=1e-4)
    for rows in (1, 2, 3, 5, 7, 11, 31, 32, 33, 64, 65, 513):
        for start in (0, 3):
            assert torch.equal(layer(x_ND[start : start + rows]), whole_NO[start : start + rows]), f"{rows} rows"


def test_no_rows() -> None:
    assert Linear(torch.randn(3, 4))(torch.empty(0, 4)).shape == (0, 3)


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
