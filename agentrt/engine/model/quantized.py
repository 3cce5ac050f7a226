"""Products in int8: weights and the rows they are multiplied with are rounded, each row of either with a scale of its own.

The scale is a row's own, so a large value in one row does not coarsen another. On the CPU the whole numbers are held in
float16 and multiplied by the product of `linear`: with at most `WIDTH` terms a sum stays below 2^24, where float32 counts
exactly, so a row's bits are those of the definition (`agentrt_kernels.matmul`) whatever is beside it and in whatever
order the terms are added. What this costs is what float16 costs; it is here for its numbers, which are those of int8 on
devices that gain by it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from agentrt.core.spec import KVPrecision, WeightPrecision
from agentrt.engine.model.linear import Linear
from agentrt_kernels.quantized.reference import LARGEST, quantize_rows

WIDTH = 1024
"""Terms of a sum: 1024 * 127 * 127 < 2^24. Sums of wider rows are added up, part by part, in float32."""


class Precision(NamedTuple):
    """In what the CPU keeps weights and KV."""

    weights: WeightPrecision = "auto"
    kv: KVPrecision = "auto"

    @property
    def rounded(self) -> tuple[str, ...]:
        """What is rounded and to what, in the words of the spec: `kv=fp16`."""
        return tuple(f"{name}={chosen}" for name, chosen in self._asdict().items() if chosen != "auto")

    @property
    def has_int8(self) -> bool:
        return "int8" in self


FULL = Precision()


class QuantizedLinear:
    """`x @ W.T + b` for float32 rows, W and x rounded to int8; each row's bits are a function of that row alone."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None = None) -> None:
        """Makes a packed copy of the weight."""
        whole_OD, self._scales_O = quantize_rows(weight_OD)
        self._parts = [Linear(part_OD.float()) for part_OD in torch.split(whole_OD, WIDTH, dim=1)]
        self._bias_O = bias_O

    def __call__(self, x_ND: Tensor) -> Tensor:
        peaks_N1 = x_ND.abs().amax(dim=1, keepdim=True)
        scales_N1 = torch.where(peaks_N1 > 0, peaks_N1 / LARGEST[torch.int8], 1.0)
        whole_ND = (x_ND / scales_N1).round_()
        first, *others = (
            part(columns_ND.contiguous())
            for part, columns_ND in zip(self._parts, torch.split(whole_ND, WIDTH, dim=1), strict=True)
        )
        out_NO = sum(others, start=first) * scales_N1 * self._scales_O
        return out_NO if self._bias_O is None else out_NO.add_(self._bias_O)
