"""What a decoder is: the sizes and switches of the Llama family, read from a Hugging Face `config.json`.

Llama, Mistral, Qwen2 and Qwen3 differ in few places: biases on the query, key and value projections (Qwen2), an RMS
norm of each head's queries and keys (Qwen3), windows. Any other architecture is refused by name.
"""

import math
from pathlib import Path
from typing import Any

import msgspec

from agentrt.core.errors import UsageError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""The architectures we decode."""


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Llama 3's stretch of slow rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the decoder's code depends on."""

    architecture: str
    vocab_size: int
    """Rows of the output layer; the tokenizer may know fewer ids."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None = None
    windows: tuple[int, ...]
    """For each layer, how many tokens back it attends; 0 means all."""
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    """The output layer is the embedding table."""


class _Source(msgspec.Struct, kw_only=True):
    """The keys of a `config.json` that we read; others are left alone."""

    architectures: list[str]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None


def load_config(folder: Path) -> ModelConfig:
    """The config of a model folder, or a `UsageError` of one sentence."""
    path = folder / "config.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; a model folder needs a config.json") from error
    return parse_config(data, str(path))


def parse_config(data: bytes, where: str) -> ModelConfig:
    """The config in a `config.json`; a `UsageError` that begins with `where` if it is none that we decode."""
    try:
        return _convert(msgspec.json.decode(data, type=_Source))
    except (msgspec.DecodeError, ValueError) as error:
        raise UsageError(f"{where}: {error}") from error


def _convert(source: _Source) -> ModelConfig:
    architecture = source.architectures[0] if source.architectures else "none"
    family = FAMILIES.get(architecture)
    if family is None:
        raise ValueError(f"the architecture {architecture} is not supported; known are {', '.join(FAMILIES)}")
    for name, value, wanted in (
        ("hidden_act", source.hidden_act, "silu"),
        ("attention_bias", source.attention_bias, False),
        ("mlp_bias", source.mlp_bias, False),
        ("quantization_config", source.quantization_config, None),
    ):
        if value != wanted:
            raise ValueError(f"{name} is {value!r} and only {wanted!r} is supported")
    num_kv_heads = source.num_key_value_heads or source.num_attention_heads
    if source.num_attention_heads % num_kv_heads:
        raise ValueError(f"{source.num_attention_heads} heads cannot share {num_kv_heads} KV heads evenly")
    theta, scaling = _rope(source)
    return ModelConfig(
        architecture=architecture,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_layers=source.num_hidden_layers,
        num_heads=source.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=source.head_dim or source.hidden_size // source.num_attention_heads,
        context_length=source.max_position_embeddings,
        norm_eps=source.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        windows=_windows(source, family),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_embeddings=source.tie_word_embeddings,
    )


def _rope(source: _Source) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    parameters = {**(source.rope_scaling or {}), **(source.rope_parameters or {})}
    theta = float(parameters.get("rope_theta") or source.rope_theta or 10_000.0)
    if not (math.isfinite(theta) and theta > 0):
        raise ValueError(f"rope_theta must be above 0, not {theta}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3":
        return theta, msgspec.convert(parameters, Llama3Scaling)
    raise ValueError(f"the rope type {kind!r} is not supported; known are 'default' and 'llama3'")


def _windows(source: _Source, family: str) -> tuple[int, ...]:
    window, layers = source.sliding_window or 0, source.num_hidden_layers
    if family == "llama" or (family != "mistral" and not source.use_sliding_window):
        return (0,) * layers
    if source.layer_types is not None and len(source.layer_types) == layers:
        return tuple(window if kind == "sliding_attention" else 0 for kind in source.layer_types)
    first = 0 if family == "mistral" else source.max_window_layers
    return tuple(window if layer >= first else 0 for layer in range(layers))
