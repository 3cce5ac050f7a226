"""The decoder against transformers, and a sequence alone against the same sequence in batches and chunks."""

import json
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrt.core.errors import UsageError
from agentrt.engine.model.config import parse_config
from agentrt.engine.model.decoder import Decoder, OpsName, PagedKV
from agentrt.engine.model.loader import load_model, read_weights
from agentrt_kernels import compiled

GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENTS: dict[str, Any] = {
    **EXPERTS, "num_key_value_heads": 6, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 12,
    "n_routed_experts": 6, "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip

MODELS = {
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 6}),
    "llama3-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16, "num_key_value_heads": 3}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3-window": (
        "SmolLM3",
        {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 5,
         "pad_token_id": 0},
    ),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-all-kinds": (
        "Gemma3",
        {**GEMMA3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
         "query_pre_attn_scalar": 24, "tie_word_embeddings": False,
         "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
         }},
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "num_experts": 5}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "num_experts": 4, "norm_topk_prob": True, "num_hidden_layers": 4,
         "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "deepseek-v2": ("DeepseekV2", {**LATENTS, "q_lora_rank": None}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {**LATENTS, "q_lora_rank": 14, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
         "routed_scaling_factor": 1.5, "rope_parameters": YARN},
    ),
    "deepseek-v3": ("DeepseekV3", {**LATENTS, "q_lora_rank": 14, "n_group": 3, "topk_group": 2}),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        {**LATENTS, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_parameters": YARN},
    ),
}  # fmt: skip


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(61, (length,), generator=torch.Generator().manual_seed(seed))


def load(folder: Any, ops: OpsName) -> Decoder:
    loaded = load_model(folder).decoder
    return loaded if ops == "cpu" else Decoder(loaded.config, read_weights(folder, loaded.config), ops)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("ops", ["cpu", "reference"])
def test_logits_equal_transformers(make_model: Any, run_chunks: Callable[..., Any], name: str, ops: OpsName) -> None:
    family, changes = MODELS[name]
    folder, model = make_model(family, **changes)
    decoder = load(folder, ops)
    prompts = [prompt(37), prompt(19, seed=1), prompt(37, seed=2)]
    with torch.inference_mode():
        expected = [model(ids.unsqueeze(0)).logits[0] for ids in prompts]
    for chunk in (37, 16, 5):
        for found, wanted in zip(run_chunks(decoder, prompts, chunk), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(run_chunks(decoder, prompts[:1], 37)[0], expected[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3", "mistral-window", "qwen3-moe-mixed", "deepseek-v3"])
def test_c29_bits_do_not_depend_on_batch_or_chunks(make_model: Any, run_chunks: Callable[..., Any], name: str) -> None:
    family, changes = MODELS[name]
    decoder = load(make_model(family, **changes)[0], "cpu")
    alone = run_chunks(decoder, [prompt(33)], 33)[0]
    for batch in (1, 2, 3, 7, 31, 32, 33):
        strangers = [prompt(1 + seed % 33, seed=seed) for seed in range(1, batch)]
        at = batch // 2
        together = run_chunks(decoder, [*strangers[:at], prompt(33), *strangers[at:]], 33 if batch % 2 else 3)
        assert torch.equal(together[at], alone), f"batch {batch}"
    for chunk in (1, 3, 16):
        assert torch.equal(run_chunks(decoder, [prompt(33)], chunk)[0], alone), f"chunk {chunk}"


def test_a_latent_page_holds_one_vector_a_token(make_model: Any) -> None:
    decoder = load(make_model("DeepseekV3", **LATENTS, q_lora_rank=14, n_group=3, topk_group=2)[0], "cpu")
    (layout,) = decoder.page_layouts(16)
    assert (layout.kv_heads, layout.head_dim, layout.kv_stride) == (1, 28, 0)
    assert layout.page_stride == 2 * 16 * 28


@pytest.mark.parametrize("changes", [{"topk_group": 1, "num_experts_per_tok": 3}, {"n_group": 6, "topk_group": 6}])
def test_experts_that_the_groups_do_not_hold_are_refused(make_model: Any, changes: dict[str, int]) -> None:
    """The choice ran dry: the same expert was taken again."""
    folder = make_model("DeepseekV3", **LATENTS, q_lora_rank=14, n_group=3, topk_group=2)[0]
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(UsageError, match=r"to be chosen from topk_group \("):
        parse_config(json.dumps(config | changes).encode(), "here")


def test_two_threads_at_once(make_model: Any, run_chunks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines' step threads, each with its own pool."""
    monkeypatch.setattr(compiled, "SPREAD_ABOVE_NANOSECONDS", 0)
    folder, _ = make_model("Llama", tie_word_embeddings=True)
    decoders = [load(folder, "cpu"), load(folder, "cpu")]
    alone = run_chunks(decoders[0], [prompt(33)], 3)[0]
    found: list[Tensor] = []

    def work(decoder: Decoder) -> None:
        found.extend(run_chunks(decoder, [prompt(33)], 3)[0] for _ in range(5))

    threads = [Thread(target=work, args=(decoder,)) for decoder in decoders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 10
    assert all(torch.equal(logits, alone) for logits in found)


def one_forward(decoder: Decoder, ids: Tensor, taps: dict[int, Tensor | None]) -> Tensor:
    """The logits of every position, from empty pages."""
    layouts, count = decoder.page_layouts(8), -(-len(ids) // 8)
    kv = [PagedKV(torch.zeros(count * layout.page_stride), layout) for layout in layouts]
    rows_N, none_N = torch.arange(len(ids)), torch.zeros(len(ids), dtype=torch.int32)
    tables_GSP = torch.arange(count, dtype=torch.int32).expand(len(layouts), 1, -1).contiguous()
    return decoder.forward(ids, rows_N, none_N, tables_GSP, kv, rows_N, taps=taps)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "gemma3-all-kinds"])
def test_layers_in_one_call_are_the_operations_one_by_one(
    make_model: Any, run_chunks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """However many threads go through them: to the bit among themselves, and to rounding of the other."""
    monkeypatch.setattr(compiled, "SPREAD_ABOVE_NANOSECONDS", 0)
    family, changes = MODELS[name]
    decoder, threads = load(make_model(family, **changes)[0], "cpu"), torch.get_num_threads()
    prompts = [prompt(37), prompt(19, seed=1)]
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(run_chunks(decoder, prompts, 16))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, first) for others in found[1:] for one, first in zip(others, found[0], strict=True))
    taps: dict[int, Tensor | None] = dict.fromkeys((0, 1, len(decoder.layers)))
    once = one_forward(decoder, prompts[0], taps)
    tapped = dict(taps)
    decoder.stack = None
    torch.testing.assert_close(one_forward(decoder, prompts[0], taps), once, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(tapped, taps, atol=1e-4, rtol=1e-5)
    for one, first in zip(run_chunks(decoder, prompts, 16), found[0], strict=True):
        torch.testing.assert_close(one, first, atol=1e-4, rtol=1e-5)


def test_no_rows_wanted(make_model: Any) -> None:
    decoder = load(make_model("Llama")[0], "cpu")
    (layout,) = decoder.page_layouts(4)
    none = torch.empty(0, dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.int64)
    logits_MV = decoder.forward(
        zero, zero, zero.int(), zero.int().view(1, 1, 1), [PagedKV(torch.zeros(layout.page_stride), layout)], none
    )
    assert logits_MV.shape == (0, 61)


def test_sizes(make_model: Any) -> None:
    folder, model = make_model("Llama", tie_word_embeddings=True)
    decoder = load(folder, "cpu")
    assert decoder.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (decoder.vocab_size, decoder.context_length, decoder.device.type) == (61, 128, "cpu")
    assert [layout.page_stride for layout in decoder.page_layouts(16)] == [2 * 2 * 2 * 16 * 8]
