"""What a decoder is: the sizes and switches of the Llama family tree, read from a Hugging Face `config.json`.

The families differ in few places: biases on the query, key and value projections (Qwen2), an RMS norm of each head's
queries and keys (Qwen3, Gemma 3), layers without rotary positions (SmolLM3), layers that attend a window (Mistral,
Gemma 3), and what only Gemma 3 has: norms after attention and MLP, scaled embeddings, a gate of gelu. Beyond the tree
there are layers of experts (Qwen3-MoE, DeepSeek) and latent attention (DeepSeek). For any other architecture
`NotDecodedError` is raised; it may run as transformers' own module (`foreign.py`).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from agentrt.core.errors import UsageError
from agentrt.engine.model.rope import Rope, YarnScaling, parse_rope
from agentrt_kernels.experts.reference import Routing

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "Gemma3ForCausalLM": "gemma3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
"""The architectures we decode."""

Gate = Literal["silu", "gelu_pytorch_tanh"]
Size = Annotated[int, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class NotDecodedError(UsageError):
    """The model may be a good one; it needs code that our decoder does not have."""


class _LackError(ValueError):
    """What our decoder lacks, before it is known for which file."""


class Sparse(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of experts."""

    layers: tuple[bool, ...]
    """For each layer, whether it is one."""
    experts: int
    width: int
    """Of an expert."""
    shared_width: int
    """Of the one that every row takes; 0 if there is none."""
    routing: Routing
    has_bias: bool
    """Experts are chosen by their score and a bias."""


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Latent attention: what is cached of a token is one vector that all heads share."""

    rank: int
    """Of the vector, but for what turns by position."""
    rope_dim: int
    nope_dim: int
    """Of a head's queries and keys, but for what turns."""
    value_dim: int
    query_rank: int
    """Of what queries are made of; 0 if they are made of the layer's input."""
    score_scale: float
    """On the product of a query and a key."""


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
    sparse: Sparse | None = None
    latent: Latent | None = None
    """With it, there is one KV head, whose size is the cached vector's."""

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that turn by position."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def group_windows(self) -> tuple[int, ...]:
        """The cache groups, each by the window of its layers: 0, then the windows, where some layers have one.

        Where all layers have a window, all are in the one group that keeps everything.
        """
        return group_windows(self.windows)

    @property
    def groups(self) -> list[int]:
        """For each layer, the cache group that it is in."""
        return groups_of(self.windows)


def group_windows(windows: Sequence[int]) -> tuple[int, ...]:
    """The windows of the cache groups of layers with these windows; see `ModelConfig.group_windows`."""
    return (0, *sorted(set(windows) - {0})) if 0 in windows else (0,)


def groups_of(windows: Sequence[int]) -> list[int]:
    """For each layer, the cache group that it is in."""
    found = group_windows(windows)
    return [found.index(window) if 0 in windows else 0 for window in windows]


class _Named(msgspec.Struct, kw_only=True):
    """What a `config.json` of any model says."""

    architectures: list[str]


class _Source(_Named, kw_only=True):
    """The keys of a `config.json` that we read; others are left alone."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size
    rms_norm_eps: Annotated[float, msgspec.Meta(ge=0)] = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_local_base_freq: float | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Size = 4
    hidden_act: str | None = None
    hidden_activation: str | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool | None = None
    sliding_window: Count | None = None
    sliding_window_pattern: Size = 6
    use_sliding_window: bool = False
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    query_pre_attn_scalar: Annotated[float, msgspec.Meta(gt=0)] = 256.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False
    quantization_config: dict[str, Any] | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None
    n_routed_experts: int = 0
    n_shared_experts: Count | None = None
    routed_scaling_factor: float = 1.0
    topk_method: str | None = "greedy"
    n_group: int | None = None
    topk_group: int | None = None
    first_k_dense_replace: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: Count | None = None
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    rope_interleave: bool = True


def load_config(folder: Path) -> ModelConfig:
    """The config of a model folder, or a `UsageError` of one sentence."""
    path = folder / "config.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; a model folder needs a config.json") from error
    return parse_config(data, str(path))


def parse_config(data: bytes, where: str) -> ModelConfig:
    """The config in a `config.json`. `UsageError` beginning with `where` if it is none, `NotDecodedError` if none of ours."""
    try:
        family = _family(msgspec.json.decode(data, type=_Named))
        return _convert(msgspec.json.decode(data, type=_Source), family)
    except _LackError as error:
        raise NotDecodedError(f"{where}: {error}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise UsageError(f"{where}: {error}") from error


def _family(source: _Named) -> str:
    architecture = source.architectures[0] if source.architectures else "none"
    if architecture not in FAMILIES:
        raise _LackError(f"the architecture {architecture} is not supported; known are {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def _convert(source: _Source, family: str) -> ModelConfig:
    num_kv_heads = source.num_key_value_heads or source.num_attention_heads
    if source.num_attention_heads % num_kv_heads:
        raise ValueError(f"{source.num_attention_heads} heads cannot share {num_kv_heads} KV heads evenly")
    head_dim = source.head_dim or source.hidden_size // source.num_attention_heads
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"a head must have an even number of dimensions, not {head_dim}")
    windows, is_tied = _windows(source, family), source.tie_word_embeddings
    config = ModelConfig(
        architecture=source.architectures[0],
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
        qk_norm=family in ("qwen3", "gemma3", "qwen3_moe"),
        gate=_gate(source, family),
        tied_embeddings=family in ("smollm3", "gemma3") if is_tied is None else is_tied,
    )
    _check(source)
    if family == "gemma3":
        return _gemma3(config, source)
    if family == "qwen3_moe":
        return msgspec.structs.replace(config, sparse=_sparse_qwen3(source))
    return _deepseek(config, source, family) if family.startswith("deepseek") else config


def _gemma3(config: ModelConfig, source: _Source) -> ModelConfig:
    return msgspec.structs.replace(
        config,
        out_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(config.hidden_size),
        query_scale=math.sqrt(config.head_dim / source.query_pre_attn_scalar),
    )


def _sparse_qwen3(source: _Source) -> Sparse | None:
    experts, dense = source.num_experts or source.num_local_experts or 0, source.mlp_only_layers or []
    step, layers = source.decoder_sparse_step, range(source.num_hidden_layers)
    return _sparse(
        source,
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers),
        experts=experts,
        routing=Routing(source.num_experts_per_tok or 8, is_normalised=source.norm_topk_prob),
    )


def _deepseek(config: ModelConfig, source: _Source, family: str) -> ModelConfig:
    """V2 scores experts by softmax and never divides their weights by the sum; V3 by sigmoid, and with a bias."""
    for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        if getattr(source, name) < 2 or getattr(source, name) % 2:
            raise ValueError(f"{name} must be even and above 0, not {getattr(source, name)}")
    if not source.rope_interleave:
        raise ValueError("rope_interleave is false and only true is supported")
    is_v3, rope = family == "deepseek_v3", config.ropes[0]
    groups = (source.n_group or 1) if is_v3 or source.topk_method == "group_limited_greedy" else 1
    routing = Routing(
        source.num_experts_per_tok or 1, "sigmoid" if is_v3 else "softmax", is_v3 and source.norm_topk_prob,
        source.routed_scaling_factor, groups, (source.topk_group or 1) if groups > 1 else 1,
    )  # fmt: skip
    layers = tuple(layer >= source.first_k_dense_replace for layer in range(config.num_layers))
    sparse = _sparse(source, layers=layers, experts=source.n_routed_experts, routing=routing, has_bias=is_v3)
    scale = (source.qk_nope_head_dim + source.qk_rope_head_dim) ** -0.5
    if rope is not None and isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        scale *= rope.scaling.sharpness(rope.scaling.mscale_all_dim) ** 2
    latent = Latent(
        rank=source.kv_lora_rank, rope_dim=source.qk_rope_head_dim, nope_dim=source.qk_nope_head_dim,
        value_dim=source.v_head_dim, query_rank=source.q_lora_rank or 0, score_scale=scale,
    )  # fmt: skip
    return msgspec.structs.replace(
        config, sparse=sparse, latent=latent, num_kv_heads=1, head_dim=latent.rank + latent.rope_dim
    )


def _sparse(
    source: _Source, *, layers: tuple[bool, ...], experts: int, routing: Routing, has_bias: bool = False
) -> Sparse | None:
    """None where all layers are dense."""
    if not any(layers) or not experts:
        return None
    if source.moe_intermediate_size < 1:
        raise ValueError(f"moe_intermediate_size must be above 0, not {source.moe_intermediate_size}")
    if not 0 < routing.top_k <= experts:
        raise ValueError(f"num_experts_per_tok is {routing.top_k}, and there are {experts} experts")
    if experts % routing.groups or not 0 < routing.kept_groups <= routing.groups:
        raise ValueError(
            f"n_group ({routing.groups}) must divide the {experts} experts, and topk_group ({routing.kept_groups}) be of them"
        )
    size = experts // routing.groups
    if routing.top_k > routing.kept_groups * size or (routing.scores == "sigmoid" and 1 < routing.groups == experts):
        raise ValueError(
            f"num_experts_per_tok is {routing.top_k}, to be chosen from topk_group ({routing.kept_groups}) of {size}"
        )
    return Sparse(
        layers=layers, experts=experts, width=source.moe_intermediate_size, routing=routing, has_bias=has_bias,
        shared_width=source.moe_intermediate_size * (source.n_shared_experts or 0),
    )  # fmt: skip


def _check(source: _Source) -> None:
    """Raise `ValueError` for what nobody here can run, and of its kinds `_LackError` for what our decoder cannot."""
    if source.quantization_config is not None:
        raise ValueError(f"quantization_config is {source.quantization_config!r} and only None is supported")
    for name, wanted in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("attn_logit_softcapping", None),
        ("final_logit_softcapping", None),
    ):
        if (value := getattr(source, name)) != wanted:
            raise _LackError(f"{name} is {value!r} and only {wanted!r} is supported")
    if source.use_bidirectional_attention:
        raise ValueError("use_bidirectional_attention is true, and a decoder attends only to what came before")


def _gate(source: _Source, family: str) -> Gate:
    gate: Gate = "gelu_pytorch_tanh" if family == "gemma3" else "silu"
    for name in ("hidden_act", "hidden_activation"):
        if (value := getattr(source, name)) not in (None, gate):
            raise _LackError(f"{name} is {value!r} and only {gate!r} is supported")
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
