"""Linear layers: weights packed where that loses nothing, and rows that do not know their neighbours.

**Packing.** On the CPU a product with few rows is bound by reading the weights, so they are kept in float16 (sums stay
float32) where the values allow it: no weight may change by more than `PACKING_ERROR`. That holds for every float16
checkpoint, exactly, and for bfloat16 ones, of which only magnitudes below 2^-17 are rounded. Any other weight keeps
float32. The values decide, or the caller, never a clock: a choice by timing would give other bits from one start to the next.

**Exact rows.** A matrix product's library picks its kernel by the number of rows, so the same row multiplied alone, among
three and among sixty-four can differ in the last bits. Our own (`agentrt_kernels.product`) takes the terms of each sum
in their order, whatever else it computes.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from agentrt_kernels.product import cpu
from agentrt_kernels.product.cpu import Panels

Product = Callable[[Tensor], Tensor]
"""Rows to rows: a `Linear`, or one that rounds."""

PACKING_ERROR = 2.0**-25
"""The most that packing may change a weight: half the smallest float16 there is."""


class Linear:
    """`x @ W.T + b`. On the CPU in float32, and each row's bits are a function of that row alone."""

    panels: Panels | None
    """The packed weight, on the CPU."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None = None, *, packed: torch.dtype | None = None) -> None:
        """On the CPU the weight is packed, as `packed` or as its own values allow; elsewhere it is shared."""
        self.bias_O, self._out_features = bias_O, weight_OD.shape[0]
        on_cpu = weight_OD.device.type == "cpu"
        self.panels = cpu.pack(weight_OD, packed or packed_type([weight_OD])) if on_cpu else None
        self._weight_OD = None if on_cpu else weight_OD

    def __call__(self, x_ND: Tensor) -> Tensor:
        if self._weight_OD is not None:
            return F.linear(x_ND, self._weight_OD, self.bias_O)
        assert self.panels is not None
        out_NO = cpu.product(x_ND, self.panels, self._out_features)
        return out_NO if self.bias_O is None else out_NO.add_(self.bias_O)


def packed_type(weights: Iterable[Tensor]) -> torch.dtype:
    """float16 if it holds all of these weights to within `PACKING_ERROR`, else float32."""
    return torch.float16 if all(map(survives_packing, weights)) else torch.float32


def survives_packing(weight_OD: Tensor) -> bool:
    """Whether float16 holds these weights to within `PACKING_ERROR`."""
    return bool(((weight_OD.half().float() - weight_OD).abs() <= PACKING_ERROR).all())
