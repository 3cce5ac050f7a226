"""New weights in the memory of the old ones, as CUDA graphs need them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from agentrt.engine.model import decoder as decoder_module
from agentrt.engine.model.config import load_config
from agentrt.engine.model.decoder import Decoder, expected_shapes
from agentrt.engine.model.experts import held_type
from agentrt.engine.model.tensors import overwrite, tensors_of

MODELS: dict[str, dict[str, Any]] = {
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "DeepseekV3": {
        "num_key_value_heads": 6, "q_lora_rank": 14, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10,
        "v_head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2,
    },
}  # fmt: skip


class PlainLinear:
    """As a linear layer is on a GPU: nothing packed."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None = None, **_: object) -> None:
        self.weight_OD, self.bias_O = weight_OD, bias_O

    def __call__(self, x_ND: Tensor) -> Tensor:
        return F.linear(x_ND, self.weight_OD, self.bias_O)


@pytest.mark.parametrize("family", list(MODELS))
def test_numbers_change_and_addresses_do_not(
    make_model: Any, run_chunks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(decoder_module, "Linear", PlainLinear)
    config = load_config(make_model(family, **MODELS[family])[0])
    old, new = (
        Decoder(
            config, {name: torch.randn(shape) * 0.3 for name, shape in expected_shapes(config).items()}, "reference"
        )
        for _ in range(2)
    )
    addresses = [tensor.data_ptr() for tensor in tensors_of(old)]
    (expected_NV,) = run_chunks(new, [torch.arange(20)], 20)
    assert not torch.equal(run_chunks(old, [torch.arange(20)], 20)[0], expected_NV)
    overwrite(old, new)
    assert torch.equal(run_chunks(old, [torch.arange(20)], 20)[0], expected_NV)
    assert [tensor.data_ptr() for tensor in tensors_of(old)] == addresses


def test_what_experts_are_chosen_by_stays_float32() -> None:
    bias = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert [held_type(name, torch.bfloat16) for name in (bias, "lm_head.weight")] == [torch.float32, torch.bfloat16]


def test_a_linear_layer_off_the_cpu_shows_its_weight() -> None:
    """The decoder's own one, where it does not pack."""
    weight_OD, bias_O = torch.empty(3, 4, device="meta"), torch.empty(3, device="meta")
    assert {tuple(tensor.shape) for tensor in tensors_of(decoder_module.Linear(weight_OD, bias_O))} == {(3, 4), (3,)}
