"""Layers of experts: each row goes through a few of many feed-forward layers, and through one that all rows share.

On the CPU each expert's products are packed and exact as any linear layer's, and a row sums its experts in their order; so
its bits are its own. On a GPU the experts' weights are one tensor and a step's rows one product.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from agentrt.engine.model.config import Sparse
from agentrt.engine.model.linear import Product

BIAS = "mlp.gate.e_score_correction_bias"
MakeLinear = Callable[[Tensor], Product]
ExpertMlp = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`x_ND`, `ids_NK` and `weights_NK` to the weighted sum of what the experts make of each row."""


class Mlp(NamedTuple):
    """A dense feed-forward layer."""

    gate_up: Product
    gate: Callable[[Tensor], Tensor]
    down: Product

    def __call__(self, x_ND: Tensor) -> Tensor:
        return self.down(self.gate(self.gate_up(x_ND)))


class Experts(NamedTuple):
    """A layer of experts."""

    router: Product
    """In float32: a choice between two experts must not depend on the type of the others' weights."""
    route: Callable[[Tensor], tuple[Tensor, Tensor]]
    mlp: ExpertMlp
    shared: Mlp | None

    def __call__(self, x_ND: Tensor) -> Tensor:
        out_ND = self.mlp(x_ND, *self.route(self.router(x_ND.float())))
        return out_ND if self.shared is None else out_ND + self.shared(x_ND)


class PackedExperts:
    """Experts one after another, each a dense layer."""

    def __init__(self, experts: list[Mlp]) -> None:
        self.experts = experts

    def __call__(self, x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        out_ND = torch.zeros_like(x_ND)
        for expert in sorted(set(ids_NK.flatten().tolist())):
            rows_R, places_R = (ids_NK == expert).nonzero(as_tuple=True)
            y_RD = self.experts[expert](x_ND[rows_R])
            out_ND.index_add_(0, rows_R, y_RD * weights_NK[rows_R, places_R].unsqueeze(1))
        return out_ND


def make_mlp(of: Callable[[str], Tensor], prefix: str, linear: MakeLinear, gate: Callable[[Tensor], Tensor]) -> Mlp:
    """The dense layer of the weights whose names begin with `prefix`."""
    gate_up_FD = torch.cat([of(f"{prefix}{name}_proj.weight") for name in ("gate", "up")])
    return Mlp(linear(gate_up_FD), gate, linear(of(f"{prefix}down_proj.weight")))


def make_experts(
    of: Callable[[str], Tensor], sparse: Sparse, linear: MakeLinear, gate: Callable[[Tensor], Tensor], ops: str
) -> Experts:
    """The layer of experts of a decoder's layer with operations of this name."""
    bias_E = of(BIAS) if sparse.has_bias else None
    route = import_module(f"agentrt_kernels.experts.{ops}").route
    prefixes = [f"mlp.experts.{expert}." for expert in range(sparse.experts)]
    mlp: ExpertMlp
    if ops == "cpu":
        mlp = PackedExperts([make_mlp(of, prefix, linear, gate) for prefix in prefixes])
    else:
        mlp = partial(
            import_module(f"agentrt_kernels.experts.{ops}").expert_mlp,
            gate_up_EFD=torch.stack(
                [torch.cat([of(f"{prefix}{name}_proj.weight") for name in ("gate", "up")]) for prefix in prefixes]
            ),
            down_EDI=torch.stack([of(f"{prefix}down_proj.weight") for prefix in prefixes]),
        )
    shared = make_mlp(of, "mlp.shared_experts.", linear, gate) if sparse.shared_width else None
    router = linear(of("mlp.gate.weight").float())
    return Experts(router, partial(route, routing=sparse.routing, bias_E=bias_E), mlp, shared)


def held_type(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a weight in a decoder of that type. What experts are chosen by differs less than bfloat16 can tell."""
    return torch.float32 if name.endswith(BIAS) else dtype


def expert_shapes(sparse: Sparse, hidden: int) -> Mapping[str, tuple[int, ...]]:
    """The weights of a layer of experts, by name within its layer."""
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (sparse.experts, hidden)}
    if sparse.has_bias:
        shapes[BIAS] = (sparse.experts,)
    for expert in range(sparse.experts):
        shapes |= mlp_shapes(f"mlp.experts.{expert}.", sparse.width, hidden)
    if sparse.shared_width:
        shapes |= mlp_shapes("mlp.shared_experts.", sparse.shared_width, hidden)
    return shapes


def mlp_shapes(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The weights of a dense feed-forward layer."""
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }
