"""Every family through the whole engine: greedy text equal to transformers', and the same bits whatever surrounds it."""

from functools import partial
from pathlib import Path
from typing import Any

import driving
import pytest
from driving import drain, output

from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.engine.model.decoder import Decoder, OpsName
from agentrt.engine.model.loader import load_model, read_weights
from agentrt.engine.runner import ModelRunner
from agentrt.engine.step import EngineCore

FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 5,
         "pad_token_id": 0},
    ),
    "gemma3": (
        "Gemma3", {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 3,
                   "query_pre_attn_scalar": 24, "rope_parameters": {
                       "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                       "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                   }},
    ),
    "qwen3_moe": (
        "Qwen3Moe", {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                     "norm_topk_prob": True},
    ),
    "deepseek_v3": (
        "DeepseekV3", {"num_key_value_heads": 6, "q_lora_rank": 14, "kv_lora_rank": 20, "qk_rope_head_dim": 8,
                       "qk_nope_head_dim": 10, "v_head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 2,
                       "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2},
    ),
}  # fmt: skip
GROUPS = {"llama": 1, "mistral": 1, "qwen2": 2, "qwen3": 1, "smollm3": 2, "gemma3": 2, "qwen3_moe": 1, "deepseek_v3": 1}
"""Cache groups: layers of all ids, layers of a window. Where all layers have the window, one group keeps all."""

PROMPT = [(7 * i + i * i) % 61 for i in range(29)]
GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams()
MAX_TOKENS = 14


def make_core(folder: Path, ops: OpsName, step_tokens: int = 512) -> EngineCore:
    spec = EngineSpec(page_size=4, kv_tokens=512, max_batch=min(8, step_tokens), step_tokens=step_tokens)
    decoder = load_model(folder).decoder
    if ops == "reference":
        decoder = Decoder(decoder.config, read_weights(folder, decoder.config), ops)
    return EngineCore(ModelRunner(decoder, spec), spec, vocab_size=61, bytes_of=lambda _: b"")


submit = partial(driving.submit, params=GREEDY, max_tokens=MAX_TOKENS)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("ops", ["cpu", "reference"])
def test_greedy_text_equals_transformers(make_model: Any, greedy: Any, family: str, ops: OpsName) -> None:
    """Cold, with a cached prefix, in chunks of 5, and among strangers; with the compiled operations also to the bit."""
    name, changes = FAMILIES[family]
    folder, model = make_model(name, **changes)
    core = make_core(folder, ops)
    assert len(core.cache.groups) == GROUPS[family]
    cold = submit(core, PROMPT)
    drain(core)
    cached = submit(core, PROMPT)
    drain(core)
    assert (cold.cached_tokens, cached.cached_tokens) == (0, 28)

    in_chunks = make_core(folder, ops, step_tokens=5)
    chunked = submit(in_chunks, PROMPT)
    drain(in_chunks)

    crowd = make_core(folder, ops)
    strangers = [submit(crowd, PROMPT[:9], params=WARM), submit(crowd, PROMPT[::-1], max_tokens=5), submit(crowd, [3])]
    for _ in range(3):
        crowd.step()
    batched = submit(crowd, PROMPT)
    drain(crowd)
    assert [len(output(stranger)[0]) for stranger in strangers] == [14, 5, 14]
    assert batched.cached_tokens == 8

    outputs = [output(sequence) for sequence in (cold, cached, chunked, batched)]
    assert [ids for ids, _ in outputs] == [greedy(model, PROMPT, MAX_TOKENS)] * 4
    if ops == "cpu":
        assert all(logprobs == outputs[0][1] for _, logprobs in outputs)
