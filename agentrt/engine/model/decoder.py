"""The decoder of the Llama family tree: token ids and pages in, logits out.

One forward takes any mix of rows: decodes, prompt chunks, several sequences. A row is a token at a position of a
sequence, whose pages tables name, one for each cache group (layers that keep KV equally long). Its keys and values are
written first, then every row attends. The same code runs on any device; the operations (`agentrt_kernels`) are chosen
once, by name. With `cpu` the layers run in one compiled call (`stack.py`), and a row's logits have the same bits whatever
else is in the batch.

Suffixes: N rows, G cache groups, S tables, P pages of a table, M rows whose logits are wanted, W twins, D the hidden
size, V the output layer's rows.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from agentrt.core.spec import KVPrecision
from agentrt.engine.model.config import Gate, ModelConfig
from agentrt.engine.model.experts import Experts, Mlp, expert_shapes, make_experts, make_mlp, mlp_shapes
from agentrt.engine.model.latent import LatentHeads, LatentOutput, latent_shapes, make_latent
from agentrt.engine.model.linear import Linear, Product, packed_type
from agentrt.engine.model.quantized import FULL, Precision, QuantizedLinear
from agentrt.engine.model.rope import rope_tables
from agentrt.engine.model.stack import Stack
from agentrt_kernels.pages import PageLayout
from agentrt_kernels.quantized.reference import SCALE_SIZE

OpsName = Literal["cpu", "launch", "reference"]
KV_TYPES = {"fp16": torch.float16, "int8": torch.int8}


class Ops(NamedTuple):
    """The operations between the linear layers; their contracts are in `agentrt_kernels/<op>/reference.py`."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Tensor]
    rotary: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    gate: Callable[..., Tensor]


class PagedKV(NamedTuple):
    """The KV of one cache group: the flat pool that its pages lie in."""

    pool: Tensor
    layout: PageLayout


class Twins(NamedTuple):
    """Rows whose KV is written to the pages of a second table too: a branch of a draft shares them with what it left."""

    rows_W: Tensor
    table_of_W: Tensor


def ops_for(device: torch.device) -> tuple[OpsName, torch.dtype]:
    """The operations for a kind of device, and the type of the weights there."""
    if device.type == "cuda":  # AMD's devices go by this name too
        return "launch", torch.bfloat16
    return ("cpu" if device.type == "cpu" else "reference"), torch.float32


def load_ops(name: OpsName, gate: Gate, kv: KVPrecision = "auto") -> Ops:
    """Import one implementation of the operations; the others are never imported."""
    rotary, attention = ("quantized", "quantized") if (name, kv) == ("cpu", "int8") else ("rotary", "paged_attention")

    def op(folder: str, function: str) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] = getattr(import_module(f"agentrt_kernels.{folder}.{name}"), function)
        return found

    return Ops(
        op("rms_norm", "rms_norm"), op("rms_norm", "add_rms_norm"), op(rotary, "rotary"),
        op(attention, "paged_attention"), op("swiglu", "swiglu") if gate == "silu" else op("geglu", "geglu"),
    )  # fmt: skip


class Layer(NamedTuple):
    """The weights of one layer, and where its KV is."""

    attention_norm_D: Tensor
    qkv: Product | LatentHeads
    qk_norms: tuple[Tensor, Tensor, float] | None
    angles: tuple[Tensor, Tensor]
    output: Product | LatentOutput
    output_norm_D: Tensor | None
    mlp_norm_D: Tensor
    mlp: Mlp | Experts
    down_norm_D: Tensor | None
    window: int
    group: int
    """Its cache group."""
    depth: int
    """Its place among the layers of its group, and so in their pages."""


class Decoder:
    """A `CausalModel`. Holds its weights and no other state, so any number of threads may call it."""

    is_capturable = True

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], ops: OpsName = "cpu", precision: Precision = FULL
    ) -> None:
        """`weights` has the tensors of `expected_shapes(config)`, of one type and on one device; `cpu` takes float32."""
        self.config, self.ops, self._ops_name = config, load_ops(ops, config.gate, precision.kv), ops
        self.precision = precision
        self.with_weights = partial(Decoder, config, ops=ops, precision=precision)
        """The same model with other weights: a new decoder."""
        self.embedding_VD = weights["model.embed_tokens.weight"]
        tables = {rope: rope_tables(rope, config.rotary_dim, config.context_length) for rope in set(config.ropes)}
        self.angles = {
            rope: (cos_TR.to(self.device), sin_TR.to(self.device)) for rope, (cos_TR, sin_TR) in tables.items()
        }
        plain = partial(
            Linear, packed=packed_type_of(config, weights, precision) if self.device.type == "cpu" else None
        )
        self._linear: Callable[..., Product] = QuantizedLinear if precision.weights == "int8" else plain
        self.layers = [self._layer(weights, index, self.angles[rope]) for index, rope in enumerate(config.ropes)]
        self.norm_D = weights["model.norm.weight"] + config.norm_offset
        self.head = plain(self.embedding_VD if config.tied_embeddings else weights["lm_head.weight"])
        is_plain = not (config.latent or config.sparse or precision.has_int8)
        self.stack = Stack(self) if ops == "cpu" and is_plain else None
        self.num_parameters = sum(weights[name].numel() for name in expected_shapes(config))

    @property
    def device(self) -> torch.device:
        return self.embedding_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights as they are given, and of what passes between the operations."""
        return self.embedding_VD.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the pages that an engine keeps; the operations of `cpu` take them in float32 or float16."""
        return KV_TYPES.get(self.precision.kv, self.dtype)

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer; the tokenizer may know fewer ids."""
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        return self.config.context_length

    @property
    def windows(self) -> tuple[int, ...]:
        """Of its cache groups; 0 keeps everything."""
        return self.config.group_windows

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights that an update brings."""
        return expected_shapes(self.config)

    @property
    def query_group(self) -> int:
        """Query heads that share a KV head."""
        return self.config.num_heads // self.config.num_kv_heads

    def page_layouts(self, page_size: int) -> tuple[PageLayout, ...]:
        """For each cache group, where KV lies in pages of `page_size` tokens.

        A pool of n pages is n * `page_stride` elements.
        """
        config, groups = self.config, [layer.group for layer in self.layers]
        scale_size, parts = SCALE_SIZE if self.kv_dtype == torch.int8 else 0, 1 if config.latent else 2
        return tuple(
            PageLayout(page_size, groups.count(group), config.num_kv_heads, config.head_dim, scale_size, parts)
            for group in range(len(config.group_windows))
        )

    @torch.inference_mode()
    def forward(
        self, token_ids_N: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_GSP: Tensor,
        kv: Sequence[PagedKV], out_rows_M: Tensor, *plan: object, taps: dict[int, Tensor | None] | None = None,
        twins: Twins | None = None,
    ) -> Tensor:  # fmt: skip
        """Write the KV of all N rows, and of `twins`, to their pages and return `logits_MV` for `out_rows_M`.

        `table_of_N` names each row's tables in `tables_GSP` (page numbers, -1 where there is none). What a row attends
        beyond the rows of this call must be in its pages already. Ids and positions are int64, tables int32. `plan` is
        what the operations' own attention takes beyond that: for `launch` a `DevicePlan`, or nothing. Each key of `taps`
        is a number of layers; its value becomes the hidden state of all rows after so many, before any norm.
        """
        residual_ND = self.embedding_VD[token_ids_N]
        if self.config.embedding_scale != 1:
            residual_ND *= self.config.embedding_scale
        if self.stack is not None:
            return self.stack.forward(residual_ND, positions_N, table_of_N, tables_GSP, kv, out_rows_M, taps, twins)
        places = [(positions_N, table_of_N, *paged) for paged in zip(tables_GSP, *zip(*kv, strict=True), strict=True)]
        ops, eps = self.ops, self.config.norm_eps
        x_ND = ops.rms_norm(residual_ND, self.layers[0].attention_norm_D, eps)
        for index, layer in enumerate(self.layers):
            if index > 0:
                x_ND = ops.add_rms_norm(x_ND, residual_ND, layer.attention_norm_D, eps)
            if taps and index in taps:
                taps[index] = residual_ND.clone()
            place = (*places[layer.group], layer.depth)
            qkv_NE = layer.qkv(x_ND)
            if twins is not None:
                second = (positions_N[twins.rows_W], twins.table_of_W, *place[2:])
                ops.rotary(qkv_NE[twins.rows_W], *layer.angles, *second, layer.qk_norms)
            q_NHD = ops.rotary(qkv_NE, *layer.angles, *place, layer.qk_norms)
            x_ND = layer.output(ops.paged_attention(q_NHD, *place, layer.window, *plan).flatten(1))
            if layer.output_norm_D is not None:
                x_ND = ops.rms_norm(x_ND, layer.output_norm_D, eps)
            x_ND = ops.add_rms_norm(x_ND, residual_ND, layer.mlp_norm_D, eps)
            x_ND = layer.mlp(x_ND)
            if layer.down_norm_D is not None:
                x_ND = ops.rms_norm(x_ND, layer.down_norm_D, eps)
        if taps and len(self.layers) in taps:
            taps[len(self.layers)] = residual_ND + x_ND
        out_MD = ops.add_rms_norm(x_ND[out_rows_M], residual_ND[out_rows_M], self.norm_D, eps)
        return self.head(out_MD)

    def _layer(self, weights: Mapping[str, Tensor], index: int, angles: tuple[Tensor, Tensor]) -> Layer:
        def of(name: str) -> Tensor:
            return weights[f"model.layers.{index}.{name}"]

        def norm(name: str) -> Tensor:
            return of(f"{name}.weight") + config.norm_offset

        attention, config = "self_attn.", self.config
        qkv, output = self._attention(of)
        qk_norms = None
        if config.qk_norm:
            qk_norms = (norm(attention + "q_norm") * config.query_scale, norm(attention + "k_norm"), config.norm_eps)
        mlp_norm = "pre_feedforward_layernorm" if config.out_norms else "post_attention_layernorm"
        return Layer(
            attention_norm_D=norm("input_layernorm"),
            qkv=qkv,
            qk_norms=qk_norms,
            angles=angles,
            output=output,
            output_norm_D=norm("post_attention_layernorm") if config.out_norms else None,
            mlp_norm_D=norm(mlp_norm),
            mlp=self._mlp(of, index),
            down_norm_D=norm("post_feedforward_layernorm") if config.out_norms else None,
            window=config.windows[index],
            group=config.groups[index],
            depth=config.groups[:index].count(config.groups[index]),
        )

    def _attention(self, of: Callable[[str], Tensor]) -> tuple[Product | LatentHeads, Product | LatentOutput]:
        config = self.config
        if config.latent:
            return make_latent(of, config, config.latent, self._linear, self.ops.rms_norm)
        bias = torch.cat([of(f"self_attn.{name}_proj.bias") for name in "qkv"]) if config.qkv_bias else None
        weight = torch.cat([of(f"self_attn.{name}_proj.weight") for name in "qkv"])
        return self._linear(weight, bias), self._linear(of("self_attn.o_proj.weight"))

    def _mlp(self, of: Callable[[str], Tensor], index: int) -> Mlp | Experts:
        sparse = self.config.sparse
        if sparse and sparse.layers[index]:
            return make_experts(of, sparse, self._linear, self.ops.gate, self._ops_name)
        return make_mlp(of, "mlp.", self._linear, self.ops.gate)


def packed_type_of(config: ModelConfig, weights: Mapping[str, Tensor], precision: Precision = FULL) -> torch.dtype:
    """The type that all linear layers are packed in on the CPU: what they all survive, or what is asked for."""
    if precision.weights == "fp16":
        return torch.float16
    matrices = {name: weight for name, weight in weights.items() if weight.dim() == 2}
    if not config.tied_embeddings:
        del matrices["model.embed_tokens.weight"]
    return packed_type(matrices.values())


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every weight the decoder reads, as Hugging Face names them."""
    hidden, heads, kv_heads, size = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if config.latent:
            layer |= latent_shapes(config, config.latent)
        else:
            layer |= {
                "self_attn.q_proj.weight": (heads * size, hidden),
                "self_attn.k_proj.weight": (kv_heads * size, hidden),
                "self_attn.v_proj.weight": (kv_heads * size, hidden),
                "self_attn.o_proj.weight": (hidden, heads * size),
            }
        if config.sparse and config.sparse.layers[index]:
            layer |= expert_shapes(config.sparse, hidden)
        else:
            layer |= mlp_shapes("mlp.", config.intermediate_size, hidden)
        if config.qkv_bias:
            layer |= {f"self_attn.{name}_proj.bias": layer[f"self_attn.{name}_proj.weight"][:1] for name in "qkv"}
        if config.out_norms:
            layer |= {"pre_feedforward_layernorm.weight": (hidden,), "post_feedforward_layernorm.weight": (hidden,)}
        if config.qk_norm:
            layer |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
