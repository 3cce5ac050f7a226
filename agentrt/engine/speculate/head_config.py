"""What a draft head is: the sizes in its `config.json`, and the tensors that its checkpoint has, by their published names.

EAGLE-3 heads have a folder of their own, whose architecture ends in `Eagle3` (as SpecForge and the EAGLE repository write
them). MTP heads are a layer after the target's last one (DeepSeek-V3: `model.layers.61` of a model of 61), in the target's
own folder or in one whose architecture ends in `NextN`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from agentrt.core.errors import UsageError
from agentrt.engine.model.config import ModelConfig, Size
from agentrt.engine.model.rope import Rope, parse_rope

Kind = Literal["eagle3", "mtp"]
Shapes = dict[str, tuple[int, ...]]

ENDINGS: dict[str, Kind] = {"Eagle3": "eagle3", "NextN": "mtp"}
"""Of an architecture's name."""


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the head's code depends on."""

    kind: Kind
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    rope: Rope
    vocab_size: int
    """Of the target."""
    draft_vocab_size: int
    taps: tuple[int, ...]
    """After how many layers of the target the hidden states are taken."""
    target: str = ""
    """Hash of the weights that it was trained for, if the one who trained it said so."""

    @property
    def prefix(self) -> str:
        """Of the layer's tensors."""
        return "midlayer." if self.kind == "eagle3" else f"model.layers.{self.taps[-1]}."

    def shapes(self) -> Shapes:
        """Name and shape of every float tensor that is read; EAGLE-3 has the int64 map `d2t` beside them."""
        hidden, mlp, size = self.hidden_size, self.intermediate_size, self.head_dim
        joined = 2 * hidden if self.kind == "eagle3" else hidden
        layer: Shapes = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (self.num_heads * size, joined),
            "self_attn.k_proj.weight": (self.num_kv_heads * size, joined),
            "self_attn.v_proj.weight": (self.num_kv_heads * size, joined),
            "self_attn.o_proj.weight": (hidden, self.num_heads * size),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (mlp, hidden),
            "mlp.up_proj.weight": (mlp, hidden),
            "mlp.down_proj.weight": (hidden, mlp),
        }
        if self.kind == "eagle3":
            layer["hidden_norm.weight"] = (hidden,)
            whole: Shapes = {
                "fc.weight": (hidden, len(self.taps) * hidden),
                "norm.weight": (hidden,),
                "lm_head.weight": (self.draft_vocab_size, hidden),
            }
        else:
            whole = {}
            layer |= {"enorm.weight": (hidden,), "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden)}
            layer["shared_head.norm.weight"] = (hidden,)
        return whole | {self.prefix + name: shape for name, shape in layer.items()}


class _Eagle(msgspec.Struct, frozen=True):
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None


class _Source(msgspec.Struct, kw_only=True):
    """The keys of a head's `config.json` that we read."""

    architectures: list[str]
    vocab_size: Size
    draft_vocab_size: Size | None = None
    hidden_size: Size
    target_hidden_size: Size | None = None
    intermediate_size: Size
    num_hidden_layers: Size
    num_nextn_predict_layers: int = 0
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size
    rms_norm_eps: Annotated[float, msgspec.Meta(ge=0)] = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    norm_before_residual: bool = False
    eagle_config: _Eagle = _Eagle()
    agentrt_target: str = ""


def kind_of(folder: Path) -> Kind | None:
    """The kind of head that a folder holds; None for a whole model."""
    source = _read(folder)
    for ending, kind in ENDINGS.items():
        if source.architectures and source.architectures[0].endswith(ending):
            return kind
    return "mtp" if source.num_nextn_predict_layers else None


def load_head_config(folder: Path, kind: Kind, target: ModelConfig) -> HeadConfig:
    """The config of a head for `target`; a `UsageError` of one sentence that says what does not fit."""
    source, where = _read(folder), folder / "config.json"
    theta = source.rope_theta or 1e4
    try:
        rope = parse_rope({**(source.rope_scaling or {}), **(source.rope_parameters or {})}, theta)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error
    layers = target.num_layers
    usual = (2, layers // 2, layers - 3)
    taps = (source.eagle_config.eagle_aux_hidden_state_layer_ids or usual) if kind == "eagle3" else (layers,)
    config = HeadConfig(
        kind=kind, hidden_size=source.hidden_size, intermediate_size=source.intermediate_size,
        num_heads=source.num_attention_heads, num_kv_heads=source.num_key_value_heads or source.num_attention_heads,
        head_dim=source.head_dim or source.hidden_size // source.num_attention_heads,
        context_length=source.max_position_embeddings, norm_eps=source.rms_norm_eps, rope=rope,
        vocab_size=source.vocab_size, draft_vocab_size=source.draft_vocab_size or source.vocab_size, taps=taps,
        target=source.agentrt_target,
    )  # fmt: skip
    _check(config, source, target, str(where))
    return config


def _check(config: HeadConfig, source: _Source, target: ModelConfig, where: str) -> None:
    """Raise `UsageError` for a head that is another model's, or that would need code that we do not have."""
    for name, found, wanted in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("target_hidden_size", source.target_hidden_size or target.hidden_size, target.hidden_size),
        ("attention_bias", source.attention_bias, False),
        ("num_hidden_layers", source.num_hidden_layers if config.kind == "eagle3" else 1, 1),
        ("norm_before_residual", source.norm_before_residual, False),
    ):
        if found != wanted:
            raise UsageError(f"{where}: {name} is {found} and must be {wanted} to draft for this model")
    if len(set(config.taps)) < len(config.taps) or not all(0 < tap <= target.num_layers for tap in config.taps):
        raise UsageError(
            f"{where}: eagle_config.eagle_aux_hidden_state_layer_ids is {list(config.taps)} and must name different "
            f"layers of the {target.num_layers} that this model has"
        )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2 or config.draft_vocab_size > config.vocab_size:
        raise UsageError(
            f"{where}: {config.num_heads} heads of {config.head_dim} numbers, which must be even, must share "
            f"{config.num_kv_heads} KV heads evenly, and {config.draft_vocab_size} drafted ids be of {config.vocab_size}"
        )


def _read(folder: Path) -> _Source:
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Source)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; a draft's folder needs a config.json") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: {error}") from error
