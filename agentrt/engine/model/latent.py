"""Latent attention (DeepSeek-V2, arXiv 2405.04434): one cached vector a token, which is key and value of all heads.

A head's keys and values are products of the vector with matrices of its own. These are moved to the other side: queries
are multiplied by the one before attention, and what attention gives by the other after it (the paper's absorption). So the
decoder's attention runs as with one KV head whose values are its keys (`PageLayout.parts` is 1).

A vector's two halves are each [what turns, half of the latent], as rotary positions turn the first dimensions of both
halves and leave the rest. Checkpoints turn neighbouring dimensions instead; their rows are put in order at load.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from agentrt.engine.model.config import Latent, ModelConfig
from agentrt.engine.model.linear import Product

NORM_EPS = 1e-6
"""Of the norms within attention, whatever the config says of the others."""

Norm = Callable[[Tensor, Tensor, float], Tensor]


class EachHead:
    """A product of its own for each head: `x_NHI` to `y_NHO`."""

    def __init__(self, weight_HOI: Tensor, linear: Callable[[Tensor], Product]) -> None:
        self._exact: list[Product] = []
        if weight_HOI.is_cpu:
            self._exact = [linear(weight_OI.contiguous()) for weight_OI in weight_HOI]
        else:
            self._weight_HIO = weight_HOI.transpose(1, 2).contiguous()

    def __call__(self, x_NHI: Tensor) -> Tensor:
        if self._exact:
            heads = [layer(x_NI.contiguous()) for layer, x_NI in zip(self._exact, x_NHI.unbind(1), strict=True)]
            return torch.stack(heads, dim=1)
        return torch.bmm(x_NHI.transpose(0, 1), self._weight_HIO).transpose(0, 1)


class LatentHeads(NamedTuple):
    """From a layer's input to the heads' queries, and the vector to cache behind them: `heads_NE`, not turned yet."""

    config: Latent
    query_down: Product | None
    query_norm: Tensor | None
    query: Product
    down: Product
    norm: Tensor
    up: EachHead
    rms_norm: Norm

    def __call__(self, x_ND: Tensor) -> Tensor:
        latent, rows = self.config, len(x_ND)
        q_NHC = self.query(self._query_input(x_ND)).view(rows, -1, latent.nope_dim + latent.rope_dim)
        cached_NC, heads = self.down(x_ND), q_NHC.shape[1]
        normed_NR = self.rms_norm(cached_NC[:, : latent.rank].contiguous(), self.norm, NORM_EPS)
        half = (latent.rank + latent.rope_dim) // 2
        heads_NG2h, turned = x_ND.new_empty(rows, heads + 1, 2, half), latent.rope_dim // 2
        heads_NG2h[:, :heads, :, turned:] = _halves(self.up(q_NHC[..., : latent.nope_dim]))
        heads_NG2h[:, :heads, :, :turned] = _halves(q_NHC[..., latent.nope_dim :])
        heads_NG2h[:, :heads] *= latent.score_scale * math.sqrt(2 * half)  # attention divides by the root of the size
        heads_NG2h[:, heads, :, turned:] = _halves(normed_NR)
        heads_NG2h[:, heads, :, :turned] = _halves(cached_NC[:, latent.rank :])
        return heads_NG2h.flatten(1)

    def _query_input(self, x_ND: Tensor) -> Tensor:
        if self.query_down is None or self.query_norm is None:
            return x_ND
        return self.rms_norm(self.query_down(x_ND), self.query_norm, NORM_EPS)


class LatentOutput(NamedTuple):
    """From what attention gives of the cached vectors to the layer's output."""

    config: Latent
    down: EachHead
    output: Product

    def __call__(self, out_NE: Tensor) -> Tensor:
        latent = self.config
        halves_NH2h = out_NE.view(len(out_NE), -1, 2, (latent.rank + latent.rope_dim) // 2)
        mixed_NHR = halves_NH2h[..., latent.rope_dim // 2 :].flatten(2)
        return self.output(self.down(mixed_NHR).flatten(1))


def make_latent(
    of: Callable[[str], Tensor],
    config: ModelConfig,
    latent: Latent,
    linear: Callable[[Tensor], Product],
    rms_norm: Norm,
) -> tuple[LatentHeads, LatentOutput]:
    """What stands before and behind the attention of one layer."""
    name = "self_attn.q_b_proj.weight" if latent.query_rank else "self_attn.q_proj.weight"
    query_HCD = of(name).view(config.num_heads, latent.nope_dim + latent.rope_dim, -1)
    down_CD, up_HCR = of("self_attn.kv_a_proj_with_mqa.weight"), of("self_attn.kv_b_proj.weight")
    of_head_HCR = up_HCR.view(config.num_heads, -1, latent.rank)
    key_HCR, value_HCR = torch.split(of_head_HCR, [latent.nope_dim, latent.value_dim], dim=1)
    heads = LatentHeads(
        config=latent,
        query_down=linear(of("self_attn.q_a_proj.weight")) if latent.query_rank else None,
        query_norm=of("self_attn.q_a_layernorm.weight") if latent.query_rank else None,
        query=linear(_ordered_rows(query_HCD, latent.nope_dim).flatten(0, 1)),
        down=linear(_ordered_rows(down_CD, latent.rank)),
        norm=of("self_attn.kv_a_layernorm.weight"),
        up=EachHead(key_HCR.transpose(1, 2), linear),
        rms_norm=rms_norm,
    )
    return heads, LatentOutput(latent, EachHead(value_HCR, linear), linear(of("self_attn.o_proj.weight")))


def latent_shapes(config: ModelConfig, latent: Latent) -> Mapping[str, tuple[int, ...]]:
    """The weights of latent attention, by name within a layer."""
    hidden, queries = config.hidden_size, config.num_heads * (latent.nope_dim + latent.rope_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.kv_a_proj_with_mqa.weight": (latent.rank + latent.rope_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.rank,),
        "self_attn.kv_b_proj.weight": (config.num_heads * (latent.nope_dim + latent.value_dim), latent.rank),
        "self_attn.o_proj.weight": (hidden, config.num_heads * latent.value_dim),
    }
    if not latent.query_rank:
        return shapes | {"self_attn.q_proj.weight": (queries, hidden)}
    return shapes | {
        "self_attn.q_a_proj.weight": (latent.query_rank, hidden),
        "self_attn.q_a_layernorm.weight": (latent.query_rank,),
        "self_attn.q_b_proj.weight": (queries, latent.query_rank),
    }


def _halves(x: Tensor) -> Tensor:
    """The last dimension in two."""
    return x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)


def _ordered_rows(weight_XCD: Tensor, first: int) -> Tensor:
    """The output rows from `first` on, of which neighbours turn together, put so that two halves do."""
    stays, turns = weight_XCD[..., :first, :], weight_XCD[..., first:, :]
    return torch.cat([stays, turns[..., 0::2, :], turns[..., 1::2, :]], dim=-2)
