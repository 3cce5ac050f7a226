"""A decoder's layers as arrays, for the call that runs them all (`agentrt_kernels.layers`), on the CPU.

Dense layers only: those of experts, and latent attention, run one operation after another.

What the layers hold is copied once, into one array a kind; their packed weights become views of it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt.engine.model.experts import Mlp
from agentrt.engine.model.linear import Linear
from agentrt_kernels.compiled import array
from agentrt_kernels.layers.cpu import Floats, Places, Weights, run_layers
from agentrt_kernels.product.cpu import Panels

if TYPE_CHECKING:
    from agentrt.engine.model.decoder import Decoder, Layer, PagedKV, Twins

NO_TWINS = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)


class Stack:
    """The layers of `decoder`, its last norm and its head; holds no other state."""

    def __init__(self, decoder: "Decoder") -> None:
        self._config = decoder.config
        self._weights = _weights(decoder)

    def forward(
        self, residual_ND: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_GSP: Tensor,
        kv: Sequence["PagedKV"], out_rows_M: Tensor, taps: dict[int, Tensor | None] | None, twins: "Twins | None",
    ) -> Tensor:  # fmt: skip
        """As `Decoder.forward`, from the embeddings on; these are overwritten."""
        config, layout = self._config, kv[0].layout
        twin_rows_W, twin_tables_W = (twins.rows_W.numpy(), twins.table_of_W.numpy()) if twins else NO_TWINS
        places = Places(
            positions_N.numpy(), table_of_N.numpy(), tables_GSP.numpy(), tuple(array(pool) for pool, _ in kv),
            np.array([(one.page_stride, one.layer_stride, one.kv_stride) for _, one in kv], dtype=np.int64),
            twin_rows_W, twin_tables_W, layout.page_size, layout.kv_heads, 0, 0,
        )  # fmt: skip
        widths = config.num_heads, config.head_dim, config.intermediate_size, config.vocab_size
        taps = {} if taps is None else taps
        logits, taps_KND = run_layers(
            residual_ND.numpy(), self._weights, places, out_rows_M.numpy(), widths, tuple(taps)
        )
        taps.update(zip(taps, torch.from_numpy(taps_KND), strict=True))
        return torch.from_numpy(logits)[:, : config.vocab_size]


def _weights(decoder: "Decoder") -> Weights:
    config, layers = decoder.config, decoder.layers
    linears = [linear for layer in layers for linear in _linears(layer)]
    packed = [_panels(linear) for linear in linears]
    stops = np.cumsum([one.size for one in packed])
    panels: NDArray[Any] = np.concatenate(packed)
    for linear, one, stop in zip(linears, packed, stops.tolist(), strict=True):
        linear.panels = panels[stop - one.size : stop]
    return Weights(
        panels=panels,
        places_L4=(stops - [one.size for one in packed]).reshape(-1, 4),
        biases_LE=_stacked([qkv.bias_O for qkv in linears[::4]], (1,)),
        norms_L4D=np.stack([_norms(layer) for layer in layers]),
        qk_norms_L2D=_stacked([layer.qk_norms and torch.stack(layer.qk_norms[:2]) for layer in layers], (2, 1)),
        angles_A2TR=np.stack([torch.stack(decoder.angles[rope]).numpy() for rope in decoder.angles]),
        facts_L4=np.array(
            [
                (list(decoder.angles).index(rope), layer.group, layer.depth, layer.window)
                for rope, layer in zip(config.ropes, layers, strict=True)
            ]
        ),
        norm_D=decoder.norm_D.numpy(),
        head=_panels(decoder.head),
        eps=np.float32(config.norm_eps),
        has_out_norms=config.out_norms,
        is_gelu=config.gate != "silu",
    )


def _linears(layer: "Layer") -> tuple[Linear, Linear, Linear, Linear]:
    """In the order of `Weights.places_L4`. A stack is made of layers that have these four and no others."""
    assert isinstance(layer.qkv, Linear)
    assert isinstance(layer.output, Linear)
    assert isinstance(layer.mlp, Mlp)
    assert isinstance(layer.mlp.gate_up, Linear)
    assert isinstance(layer.mlp.down, Linear)
    return layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down


def _panels(linear: Linear) -> Panels:
    assert linear.panels is not None
    return linear.panels


def _norms(layer: "Layer") -> Floats:
    """In the order of `Weights.norms_L4D`; where there is none, one that nobody looks at."""
    names = layer.attention_norm_D, layer.output_norm_D, layer.mlp_norm_D, layer.down_norm_D
    return np.stack([(layer.mlp_norm_D if norm is None else norm).numpy() for norm in names])


def _stacked(tensors: Sequence[Tensor | None], shape: tuple[int, ...]) -> Floats:
    """All of them, or none."""
    there = [tensor.numpy() for tensor in tensors if tensor is not None]
    return np.stack(there) if there else np.empty((0, *shape), dtype=np.float32)
