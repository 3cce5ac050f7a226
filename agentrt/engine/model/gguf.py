"""A GGUF file of the Llama family becomes a model folder: config.json, tokenizer files and safetensors.

Quantised weights are multiplied out to float16. llama.cpp keeps the rows of query and key projections in another order
(rotary pairs side by side); here they go back to Hugging Face's (halves of a head). A GGUF tokenizer names its rules for
splitting text; only those in `SPLITTERS` are known, and any other is refused rather than guessed.
"""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from agentrt.core.errors import UsageError

CONTROL = 3
"""A token's type: it stands for no text."""
SPLITTERS: Mapping[str, list[dict[str, Any]]] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
}
"""Pre-tokenizers of the `tokenizers` library, by the name that GGUF has for them."""

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def convert(file: Path, folder: Path) -> None:
    """Write the model in `file` to the empty `folder`. `UsageError` if it is of a kind that is not known here."""
    require_gguf()
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise UsageError(f"{file}: the architecture {fields.get('general.architecture')!r} is not known; only llama is")
    config = config_of(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    texts = {
        "config.json": config,
        "tokenizer.json": tokenizer_of(fields),
        "tokenizer_config.json": tokenizer_config_of(fields),
    }
    for name, data in texts.items():
        (folder / name).write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    save_file(weights_of(reader.tensors, config), folder / "model.safetensors", metadata={"format": "pt"})


def require_gguf() -> None:
    """`UsageError` if the package that reads GGUF files is missing."""
    if find_spec("gguf") is None:
        raise UsageError("reading a GGUF file needs the package gguf: pip install 'agentrt[gguf]'")


def config_of(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """The `config.json`."""
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # a float32 as it was written
        "rope_theta": fields.get("llama.rope.freq_base", 10_000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float16",
    }


def tokenizer_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizer.json` of a byte-level BPE."""
    kind, splitter = fields.get("tokenizer.ggml.model"), str(fields.get("tokenizer.ggml.pre"))
    if kind != "gpt2" or splitter not in SPLITTERS:
        raise UsageError(f"a tokenizer of kind {kind!r} with the splitting rules {splitter!r} is not known")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    added = [
        {"id": index, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for index, (text, token_type) in enumerate(zip(tokens, types, strict=True)) if token_type == CONTROL
    ]  # fmt: skip
    byte_level = SPLITTERS[splitter][-1]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITTERS[splitter]}, "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {text: index for index, text in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }  # fmt: skip


def tokenizer_config_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizer_config.json`: the chat template and the tokens that it may name."""
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {
        "bos_token": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token": fields.get("tokenizer.ggml.padding_token_id"),
    }
    named = {name: tokens[index] for name, index in ids.items() if index is not None}
    return named | {"chat_template": fields["tokenizer.chat_template"], "tokenizer_class": "PreTrainedTokenizerFast"}


def weights_of(tensors: Any, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights by their Hugging Face names, float16."""
    from gguf.quants import dequantize

    weights = {}
    for tensor in tensors:
        values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        name, heads_of = name_of(tensor.name)
        if heads_of:
            values = unpermuted(values, config[heads_of])
        weights[name] = torch.from_numpy(values.astype(np.float16))
    return weights


def name_of(name: str) -> tuple[str, str]:
    """A tensor's Hugging Face name, and the config's key for its number of heads if its rows are permuted."""
    if name in _NAMES:
        return _NAMES[name], ""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(part, "")
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight", heads
    raise UsageError(f"a llama model has no tensor {name!r}")


def unpermuted(weight_OD: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of each head from pairs (0, 1), (2, 3), ... back to halves."""
    rows, columns = weight_OD.shape
    pairs_HP2D = weight_OD.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs_HP2D.swapaxes(1, 2).reshape(rows, columns)
