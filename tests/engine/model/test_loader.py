"""Model folders: what is read, what is refused and with which words."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrt.core.errors import UsageError
from agentrt.engine.model.config import parse_config
from agentrt.engine.model.loader import load_model
from agentrt.engine.model.rope import LinearScaling, Rope


@pytest.fixture
def folder(make_model: Any, tmp_path: Path) -> Path:
    """A model folder of the test's own."""
    source, _ = make_model("Llama", tie_word_embeddings=False)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    return tmp_path


def shard(folder: Path) -> dict[str, str]:
    """Cut the weights into two files; the index's map."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_a_model_in_shards_is_the_same_model(folder: Path) -> None:
    single = load_model(folder)
    shard(folder)
    sharded = load_model(folder)
    assert sharded.model_hash == single.model_hash
    x_ND = torch.randn(3, sharded.decoder.config.hidden_size)
    assert torch.equal(sharded.decoder.head(x_ND), single.decoder.head(x_ND))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(folder: Path, dtype: torch.dtype) -> None:
    full = load_model(folder)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    half = load_model(folder)
    assert half.model_hash != full.model_hash
    assert torch.equal(half.decoder.embedding_VD, weights["model.embed_tokens.weight"].float())


def test_missing_parts_are_named(folder: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory; a model folder needs a config"):
        load_model(folder / "nowhere")
    weights = load_file(folder / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UsageError, match=r"model\.norm\.weight is missing"):
        load_model(folder)
    save_file({**weights, "model.norm.weight": norm[:-1].clone()}, folder / "model.safetensors")
    with pytest.raises(UsageError, match=r"model\.norm\.weight is \(47,\) and by config\.json \(48,\)"):
        load_model(folder)
    save_file({**weights, "model.norm.weight": norm.to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(UsageError, match=r"model\.norm\.weight is I8 and must be floats"):
        load_model(folder)
    whole = (folder / "model.safetensors").read_bytes()
    for length in (0, 4, 8, 100, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(UsageError, match=r"model\.safetensors: cannot be read: .*; fetch or save it again"):
            load_model(folder)
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UsageError, match="cannot be read"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"needs model\.safetensors, or model\.safetensors\.index\.json"):
        load_model(folder)


def test_missing_shards_are_named(folder: Path) -> None:
    weight_map = shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(UsageError, match=r"b\.safetensors: cannot be read"):
        load_model(folder)
    del weight_map["lm_head.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UsageError, match=r"lm_head\.weight is missing"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "the architecture MambaForCausalLM is not supported; known are Llama",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' and only 'silu' is supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "the rope type 'dynamic' is not supported"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4 KV heads evenly"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"vocab_size": 0}, r"Expected `int` >= 1 - at `\$.vocab_size`"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"head_dim": 7}, "a head must have an even number of dimensions, not 7"),
        ({"head_dim": None, "num_attention_heads": 64}, "a head must have an even number of dimensions, not 0"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta must be above 1, not 1.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "factor"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "high_freq_factor must be above low_freq_factor",
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "hidden_act": None, "query_pre_attn_scalar": 0},
            "query_pre_attn_scalar",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "kv_lora_rank must be even and above 0, not 0"),
        ({"architectures": []}, "the architecture none is not supported"),
    ],
)
def test_configs_that_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    with pytest.raises(UsageError, match=message) as caught:
        parse_config(json.dumps(config).encode(), "here/config.json")
    assert str(caught.value).startswith("here/config.json: ")


def test_old_and_new_spelling_of_rope(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    new = parse_config(json.dumps(config).encode(), "new")
    del config["rope_parameters"]
    old = parse_config(json.dumps(config | {"rope_theta": 5000.0, "rope_scaling": None}).encode(), "old")
    assert new == old
    assert new.ropes == (Rope(5000.0),) * 2


def test_gemma3_as_the_hub_has_it() -> None:
    """Before transformers 5: two bases, a pattern of windows, and what is usual left out."""
    config = {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 256, "query_pre_attn_scalar": 64,
        "rope_local_base_freq": 10000, "rope_theta": 1000000, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 8, "sliding_window_pattern": 6,
    }  # fmt: skip
    parsed = parse_config(json.dumps(config).encode(), "here")
    assert parsed.windows == (8, 8, 8, 8, 8, 0, 8)
    assert parsed.ropes == (*(Rope(1e4),) * 5, Rope(1e6, LinearScaling(factor=8.0)), Rope(1e4))
    assert parsed.group_windows == (0, 8)
    assert parsed.groups == [1, 1, 1, 1, 1, 0, 1]
    assert (parsed.gate, parsed.query_scale, parsed.embedding_scale) == ("gelu_pytorch_tanh", 0.5, 8.0)
    assert parsed.tied_embeddings
    assert parsed.qk_norm
    for name, value in (
        ("final_logit_softcapping", 30.0),
        ("use_bidirectional_attention", True),
        ("hidden_act", "silu"),
    ):
        with pytest.raises(UsageError, match=name):
            parse_config(json.dumps(config | {name: value}).encode(), "here")


def test_layers_of_smollm3_without_positions(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5, "rope_parameters": None}
    parsed = parse_config(json.dumps(config).encode(), "here")
    assert parsed.ropes == (Rope(2e6), Rope(2e6), Rope(2e6), None, Rope(2e6))
    assert parsed.group_windows == (0,)


def test_where_all_layers_have_a_window_one_group_keeps_all(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    parsed = parse_config(
        json.dumps(config | {"architectures": ["MistralForCausalLM"], "sliding_window": 9}).encode(), "here"
    )
    assert (parsed.windows, parsed.group_windows, parsed.groups) == ((9, 9), (0,), [0, 0])
