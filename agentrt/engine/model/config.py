"""What a decoder is: the sizes and switches of the Llama family tree, read from a Hugging Face `config.json`.

The families differ in few places: biases on the query, key and value projections (Qwen2), an RMS norm of each head's
queries and keys (Qwen3, Gemma 3), layers without rotary positions (SmolLM3), layers that attend a window (Mistral,
Gemma 3), and what only Gemma 3 has: norms after attention and MLP, scaled embeddings, a gate of gelu. Any other
architecture is refused by name.
"""

import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentrt.core.errors import UsageError
from agentrt.engine.model.rope import Rope, parse_rope

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "Gemma3ForCausalLM": "gemma3",
}
"""The architectures we decode."""

Gate = Literal["silu", "gelu_pytorch_tanh"]


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
    ropes: tuple[Rope | None, ...]
    """For each layer, its rotary positions."""
    windows: tuple[int, ...]
    """For each layer, how many tokens back it attends, itself counted; 0 means all."""
    qkv_bias: bool = False
    qk_norm: bool = False
    out_norms: bool = False
    """Attention and MLP have a norm after them too, before their sum with the residual."""
    norm_offset: float = 0.0
    """Norm weights are stored less this."""
    embedding_scale: float = 1.0
    query_scale: float = 1.0
    """On normed queries, beyond the 1 / sqrt(head_dim) that all have."""
    gate: Gate = "silu"
    tied_embeddings: bool = False
    """The output layer is the embedding table."""

    @property
    def group_windows(self) -> tuple[int, ...]:
        """The cache groups, each by the window of its layers: 0, then the windows, where some layers have one.

        Where all layers have a window, all are in the one group that keeps everything.
        """
        return (0, *sorted(set(self.windows) - {0})) if 0 in self.windows else (0,)

    def group_of(self, layer: int) -> int:
        """The cache group that a layer is in."""
        return self.group_windows.index(self.windows[layer]) if 0 in self.windows else 0


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
    rope_local_base_freq: float | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4
    hidden_act: str | None = None
    hidden_activation: str | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool | None = None
    sliding_window: int | None = None
    sliding_window_pattern: int = 6
    use_sliding_window: bool = False
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False
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
    num_kv_heads = source.num_key_value_heads or source.num_attention_heads
    if source.num_attention_heads % num_kv_heads:
        raise ValueError(f"{source.num_attention_heads} heads cannot share {num_kv_heads} KV heads evenly")
    head_dim = source.head_dim or source.hidden_size // source.num_attention_heads
    windows, is_tied = _windows(source, family), source.tie_word_embeddings
    config = ModelConfig(
        architecture=architecture,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_layers=source.num_hidden_layers,
        num_heads=source.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=source.max_position_embeddings,
        norm_eps=source.rms_norm_eps,
        ropes=_ropes(source, family, windows),
        windows=windows,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        gate=_gate(source, family),
        tied_embeddings=family in ("smollm3", "gemma3") if is_tied is None else is_tied,
    )
    _check(source)
    return _gemma3(config, source) if family == "gemma3" else config


def _gemma3(config: ModelConfig, source: _Source) -> ModelConfig:
    return msgspec.structs.replace(
        config,
        out_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(config.hidden_size),
        query_scale=math.sqrt(config.head_dim / source.query_pre_attn_scalar),
    )


def _check(source: _Source) -> None:
    """Raise `ValueError` for what would need code that we do not have."""
    for name, wanted in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("attn_logit_softcapping", None),
        ("final_logit_softcapping", None),
        ("quantization_config", None),
    ):
        if (value := getattr(source, name)) != wanted:
            raise ValueError(f"{name} is {value!r} and only {wanted!r} is supported")
    if source.use_bidirectional_attention:
        raise ValueError("use_bidirectional_attention is true, and a decoder attends only to what came before")


def _gate(source: _Source, family: str) -> Gate:
    gate: Gate = "gelu_pytorch_tanh" if family == "gemma3" else "silu"
    for name in ("hidden_act", "hidden_activation"):
        if (value := getattr(source, name)) not in (None, gate):
            raise ValueError(f"{name} is {value!r} and only {gate!r} is supported")
    return gate


def _windows(source: _Source, family: str) -> tuple[int, ...]:
    window, layers = source.sliding_window or 0, range(source.num_hidden_layers)
    if family == "llama" or (family not in ("mistral", "gemma3") and not source.use_sliding_window):
        return (0,) * len(layers)
    if source.layer_types is not None and len(source.layer_types) == len(layers):
        return tuple(window if kind == "sliding_attention" else 0 for kind in source.layer_types)
    if family == "gemma3":
        return tuple(window if (layer + 1) % source.sliding_window_pattern else 0 for layer in layers)
    if family == "smollm3":
        return tuple(0 if has_rope else window for has_rope in _has_rope(source))
    first = 0 if family == "mistral" else source.max_window_layers
    return tuple(window if layer >= first else 0 for layer in layers)


def _ropes(source: _Source, family: str, windows: tuple[int, ...]) -> tuple[Rope | None, ...]:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before); Gemma 3 has two of each."""
    parameters = {**(source.rope_scaling or {}), **(source.rope_parameters or {})}
    if family == "gemma3":
        everywhere = parse_rope(parameters.get("full_attention", parameters), source.rope_theta or 1e6)
        nearby = parse_rope(parameters.get("sliding_attention", {}), source.rope_local_base_freq or 1e4)
        return tuple(nearby if window else everywhere for window in windows)
    rope = parse_rope(parameters, source.rope_theta or (2e6 if family == "smollm3" else 1e4))
    if family == "smollm3":
        return tuple(rope if has_rope else None for has_rope in _has_rope(source))
    return (rope,) * source.num_hidden_layers


def _has_rope(source: _Source) -> list[bool]:
    """SmolLM3: every so many layers, one has no rotary positions."""
    layers, interval = source.num_hidden_layers, source.no_rope_layer_interval
    given = source.no_rope_layers or [int((layer + 1) % interval != 0) for layer in range(layers)]
    return [bool(has_rope) for has_rope in given[:layers]]
