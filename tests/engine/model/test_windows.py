"""C41: sliding windows and grouped heads by number, against a dense reference in plain loops over heads and layers."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.engine.batch import Batch
from agentrt.engine.model.config import ModelConfig
from agentrt.engine.model.decoder import Decoder, OpsName, expected_shapes
from agentrt.engine.model.rope import Rope, rope_tables
from agentrt.engine.runner import ModelRunner
from agentrt.engine.sequence import Sequence
from agentrt.engine.step import EngineCore

LOCAL, GLOBAL = 4, 0
CONFIG = ModelConfig(
    architecture="toy", vocab_size=23, hidden_size=32, intermediate_size=40, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, context_length=32, norm_eps=1e-6, ropes=(Rope(100.0),) * 3, windows=(LOCAL, GLOBAL, LOCAL),
    tied_embeddings=True,
)  # fmt: skip
PREFIX = [3, 1, 4, 1, 5, 9]
IDS = [*PREFIX, 2, 6, 8]


def make_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(41)
    return {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in expected_shapes(CONFIG).items()}


def dense(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """The logits after the last id, with a full matrix of scores for every head."""
    cos_TR, sin_TR = rope_tables(Rope(100.0), 8, len(ids))

    def norm(x_TD: Tensor, name: str) -> Tensor:
        return x_TD / (x_TD.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weights[name]

    def turn(x_TD: Tensor) -> Tensor:
        first, second = x_TD[:, :4], x_TD[:, 4:]
        return torch.cat([first * cos_TR - second * sin_TR, second * cos_TR + first * sin_TR], dim=1)

    x_TD = weights["model.embed_tokens.weight"][ids]
    for layer, window in enumerate(CONFIG.windows):
        at = f"model.layers.{layer}."
        normed_TD = norm(x_TD, at + "input_layernorm.weight")
        q_TE, k_TE, v_TE = (normed_TD @ weights[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        heads = []
        for head, kv_head in ((0, 0), (1, 0), (2, 1), (3, 1)):
            q_TD = turn(q_TE[:, 8 * head : 8 * head + 8])
            k_TD, v_TD = turn(k_TE[:, 8 * kv_head : 8 * kv_head + 8]), v_TE[:, 8 * kv_head : 8 * kv_head + 8]
            scores_TT = q_TD @ k_TD.T / math.sqrt(8)
            for i in range(len(ids)):
                for j in range(len(ids)):
                    if not (i - 4 < j <= i if window else j <= i):
                        scores_TT[i, j] = -math.inf
            heads.append(scores_TT.softmax(1) @ v_TD)
        x_TD = x_TD + torch.cat(heads, dim=1) @ weights[at + "self_attn.o_proj.weight"].T
        normed_TD = norm(x_TD, at + "post_attention_layernorm.weight")
        gate_TF, up_TF = (normed_TD @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x_TD = x_TD + (torch.nn.functional.silu(gate_TF) * up_TF) @ weights[at + "mlp.down_proj.weight"].T
    return norm(x_TD[-1:], "model.norm.weight")[0] @ weights["model.embed_tokens.weight"].T


class Recorder(ModelRunner):
    """Keeps the logits of each step."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.logits_MV = super().run(batch)
        return self.logits_MV


def last_logits(core: EngineCore, ids: list[int]) -> tuple[Tensor, int]:
    """The logits after `ids`, and how many of these were cached."""
    tokens = Tokens()
    tokens.observe(ids)
    sequence = Sequence(tokens=tokens, params=SamplingParams(), max_tokens=1)
    core.submit(sequence, core.open())
    while not core.is_idle:
        core.step()
        core.check()
    return torch.from_numpy(core.runner.logits_MV[0]), sequence.cached_tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize("ops", ["cpu", "reference"])
@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
@pytest.mark.parametrize("step_tokens", [32, 3])
def test_c41_logits_equal_a_dense_reference(ops: OpsName, length: int, step_tokens: int) -> None:
    """Cold, and after the prefix of 6 ids was computed: of that, whole pages of 2 short of the last id are cached."""
    weights = make_weights()
    spec = EngineSpec(page_size=2, kv_tokens=64, max_batch=2, step_tokens=step_tokens)
    cold, warm = (
        EngineCore(Recorder(Decoder(CONFIG, weights, ops), spec), spec, vocab_size=23, bytes_of=lambda _: b"")
        for _ in range(2)
    )
    assert [group.window for group in cold.cache.groups] == [GLOBAL, LOCAL]
    expected_V = dense(weights, IDS[:length])
    logits_V, cached = last_logits(cold, IDS[:length])
    assert cached == 0
    torch.testing.assert_close(logits_V, expected_V, atol=1e-4, rtol=0)

    last_logits(warm, PREFIX)
    again_V, cached = last_logits(warm, IDS[:length])
    assert cached == {3: 2, 4: 2, 5: 4, 8: 6, 9: 6}[length]
    torch.testing.assert_close(again_V, expected_V, atol=1e-4, rtol=0)
    if ops == "cpu":
        assert torch.equal(again_V, logits_V)
