"""Draft heads: one decoder layer over hidden states of the target, which says the id after the next one.

Row j of a sequence joins id j with what the target made of the ids before it (its hidden states at j - 1). Its output is
the law of id j + 1, and a hidden state that stands in for the target's at row j + 1 when ids are drafted in a chain. So a
row depends on ids 0..j and no others, and its keys and values can be cached by prefix like the target's own. A row whose
hidden states nobody computed here (the first of all, the first after a cached prefix) has zeros in their place.

- **EAGLE-3** (Li et al. 2025): three hidden states, fused by `fc`; attention sees the embedding beside them; an output
  layer of its own over a part of the vocabulary, which `d2t` maps (id of the target = id + d2t[id]).
- **MTP** (DeepSeek-V3): the target's last hidden state, after its final norm; `eh_proj` joins it with the embedding; the
  output layer is the target's.

Both use the target's embedding. Suffixes: N rows, M rows whose law is wanted, D the hidden size, F the hidden states of a
row side by side, G cache groups (one), S sequences, P pages of a table, V ids of the draft's vocabulary.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from agentrt.engine.model.decoder import Decoder, PagedKV
from agentrt.engine.model.linear import Linear
from agentrt.engine.model.rope import rope_tables
from agentrt.engine.model.tensors import overwrite
from agentrt.engine.speculate.head_config import HeadConfig
from agentrt.engine.weights import Install
from agentrt_kernels.pages import PageLayout


class Step(NamedTuple):
    """What one pass of a draft model gives for each row that was asked for."""

    logits_MV: Tensor
    features_MD: Tensor | None
    """What the next row of a chain takes in the place of the target's hidden states; None if it takes nothing."""


class _Layer(NamedTuple):
    norms: dict[str, Tensor]
    join: Linear
    """`fc` or `eh_proj`."""
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    head: Linear | None
    """None if the target's is used."""


class DraftHead:
    """A head over `target`, which changes with every update of the policy."""

    windows = (0,)
    """Of its cache groups: one, which keeps everything."""

    def __init__(self, config: HeadConfig, weights: Mapping[str, Tensor], target: Decoder) -> None:
        """`weights` has the tensors of `config.shapes()`, and `d2t` if the draft's vocabulary is a part of the target's."""
        self.config, self.target, self.kind, self.taps = config, target, config.kind, config.taps
        self.context_length = config.context_length
        self.ids_V: Tensor | None = None
        """The target's id for each of its own; None if they are the same."""
        self.query_group = config.num_heads // config.num_kv_heads
        cos_TR, sin_TR = rope_tables(config.rope, config.head_dim, config.context_length)
        self._angles = cos_TR.to(target.device), sin_TR.to(target.device)
        self.shapes = config.shapes()
        self._layer = self._made(weights)
        if "d2t" in weights:
            self.ids_V = (torch.arange(len(weights["d2t"])) + weights["d2t"].cpu()).to(target.device)

    def stage(self, weights: Mapping[str, Tensor]) -> Install:
        """New weights of the same shapes; the map between the vocabularies stays."""
        return partial(self._use, self._made(weights))

    def _use(self, layer: _Layer) -> None:
        if self.target.device.type == "cpu":
            self._layer = layer
        else:
            overwrite(self._layer, layer)  # graphs read the memory of the weights that they were captured with

    def page_layouts(self, page_size: int) -> tuple[PageLayout, ...]:
        """For its one cache group, where keys and values lie in pages of `page_size` ids."""
        return (PageLayout(page_size, 1, self.config.num_kv_heads, self.config.head_dim),)

    @torch.inference_mode()
    def fuse(self, taken_NF: Tensor) -> Tensor:
        """Hidden states of the target, as `features_ND` of `forward`."""
        if self.config.kind == "eagle3":
            return self._layer.join(taken_NF)
        return self.target.ops.rms_norm(taken_NF, self.target.norm_D, self.target.config.norm_eps)

    @torch.inference_mode()
    def forward(
        self, token_ids_N: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_GSP: Tensor, kv: Sequence[PagedKV],
        out_rows_M: Tensor, features_ND: Tensor, *plan: object,
    ) -> Step:  # fmt: skip
        """Write the KV of all rows to their pages; the laws and features of `out_rows_M`. Else as `Decoder.forward`."""
        layer, norms, ops, eps = self._layer, self._layer.norms, self.target.ops, self.config.norm_eps
        place = (positions_N, table_of_N, tables_GSP[0], *kv[0], 0)
        embedded_ND = self.target.embedding_VD[token_ids_N]
        if self.config.kind == "eagle3":
            residual_ND, inner = features_ND, (norms["input_layernorm"], norms["hidden_norm"])
            x_NE = _joined(ops.rms_norm(embedded_ND, inner[0], eps), ops.rms_norm(features_ND, inner[1], eps))
        else:
            both = (ops.rms_norm(embedded_ND, norms["enorm"], eps), ops.rms_norm(features_ND, norms["hnorm"], eps))
            residual_ND = layer.join(_joined(*both))
            x_NE = ops.rms_norm(residual_ND, norms["input_layernorm"], eps)
        q_NHD = ops.rotary(layer.qkv(x_NE), *self._angles, *place, None)
        x_ND = layer.output(ops.paged_attention(q_NHD, *place, 0, *plan).flatten(1))
        residual_MD = residual_ND[out_rows_M]
        x_MD = ops.add_rms_norm(x_ND[out_rows_M], residual_MD, norms["post_attention_layernorm"], eps)
        x_MD = layer.down(ops.gate(layer.gate_up(x_MD)))
        x_MD = ops.add_rms_norm(x_MD, residual_MD, norms["norm"], eps)
        return Step((layer.head or self.target.head)(x_MD), residual_MD)

    def _made(self, weights: Mapping[str, Tensor]) -> _Layer:
        device, dtype = self.target.device, self.target.dtype
        return _made(self.config, {name: tensor.to(device, dtype, copy=True) for name, tensor in weights.items()})


def _joined(embedded_ND: Tensor, features_ND: Tensor) -> Tensor:
    return torch.cat([embedded_ND, features_ND], dim=1)


def _made(config: HeadConfig, weights: Mapping[str, Tensor]) -> _Layer:
    """The layer in the form that is computed with. Bits of a draft may depend on its batch: it is only a proposal."""

    def linear(*names: str) -> Linear:
        return Linear(torch.cat([weights[f"{name}.weight"] for name in names]))

    prefix, is_eagle = config.prefix, config.kind == "eagle3"
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    names = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if is_eagle else ["enorm", "hnorm"])]
    norms = {name: weights[f"{prefix}{name}.weight"] for name in names}
    norms["norm"] = weights["norm.weight" if is_eagle else f"{prefix}shared_head.norm.weight"]
    return _Layer(
        norms=norms,
        join=linear("fc" if is_eagle else f"{prefix}eh_proj"),
        qkv=linear(*(f"{attention}{name}_proj" for name in "qkv")),
        output=linear(f"{attention}o_proj"),
        gate_up=linear(f"{mlp}gate_proj", f"{mlp}up_proj"),
        down=linear(f"{mlp}down_proj"),
        head=linear("lm_head") if is_eagle else None,
    )
