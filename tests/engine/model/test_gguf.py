"""GGUF files: what comes out is, tensor by tensor and token by token, the model that went in."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from agentrt.core.errors import UsageError
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.model.gguf import _LAYER_NAMES, convert, tokenizer_of, unpermuted
from agentrt.engine.model.loader import load_model

TOKENS = ["<|im_start|>", "<|im_end|>", *(chr(code) for code in range(0x21, 0x7F)), "Ġ", "Ċ", "th", "the"]
MERGES = ["t h", "th e"]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SIZES = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 50_000.0, "tie_word_embeddings": True,
}  # fmt: skip


def permuted(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """As llama.cpp's converter has it: halves of a head become pairs."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(path: Path, model: LlamaForCausalLM, **changed: Any) -> None:
    writer = gguf.GGUFWriter(path, changed.get("architecture", "llama"))
    writer.add_context_length(SIZES["max_position_embeddings"])  # type: ignore[arg-type]
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changed.get("splitter", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    theirs = {
        f"model.layers.{n}.{ours}.weight": f"blk.{n}.{name}.weight"
        for n in (0, 1)
        for name, ours in _LAYER_NAMES.items()
    }
    theirs |= {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = permuted(values, 4 if "q_proj" in name else 2)
        kind = gguf.GGMLQuantizationType.Q8_0 if "mlp" in name else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(theirs[name], data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))  # type: ignore[arg-type]


def test_a_file_becomes_the_model_it_was_made_of(model: LlamaForCausalLM, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", model)
    folder = tmp_path / "out"
    folder.mkdir()
    convert(tmp_path / "m.gguf", folder)
    weights, wanted = load_file(folder / "model.safetensors"), model.state_dict()
    assert weights.keys() == wanted.keys() - {"lm_head.weight"}
    for name, tensor in weights.items():
        assert tensor.dtype is torch.float16
        error = (tensor.float() - wanted[name]).abs().max().item()
        assert error < (5e-3 if "mlp" in name else 1e-3), name
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in SIZES} == SIZES
    assert load_model(folder).decoder.vocab_size == len(TOKENS)


def test_the_tokenizer_merges_and_knows_its_control_tokens(model: LlamaForCausalLM, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", model)
    folder = tmp_path / "out"
    folder.mkdir()
    convert(tmp_path / "m.gguf", folder)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.special == {"<|im_start|>": 0, "<|im_end|>": 1}
    ids = tokenizer.encode("the 12<")
    assert [TOKENS[index] for index in ids] == ["the", "Ġ", "1", "2", "<"]
    assert tokenizer.decode([0, *ids, 1]) == "<|im_start|>the 12<<|im_end|>"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["chat_template"], config["bos_token"], config["eos_token"]) == (
        TEMPLATE,
        "<|im_start|>",
        "<|im_end|>",
    )


@pytest.mark.parametrize(("rows", "heads"), [(64, 4), (32, 2), (6, 1)])
def test_unpermuted_undoes_what_llama_cpp_does(rows: int, heads: int) -> None:
    weight = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    assert (unpermuted(permuted(weight, heads), heads) == weight).all()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"architecture": "gemma"}, "the architecture 'gemma' is not known"),
        ({"splitter": "qwen2"}, "'qwen2' is not known"),
    ],
)
def test_what_is_not_known_is_refused(
    changed: dict[str, str], words: str, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", model, **changed)
    with pytest.raises(UsageError, match=words):
        convert(tmp_path / "m.gguf", tmp_path)


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="of kind 'llama'"):
        tokenizer_of({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "smollm"})
