"""Linear layers: weights packed where that loses nothing, and rows that do not know their neighbours.

**Packing.** On the CPU a product with few rows is bound by reading the weights, so they are kept in float16 (FBGEMM's
packed form; sums stay float32) where the values allow it: no weight may change by more than `PACKING_ERROR`. That holds
for every float16 checkpoint, exactly, and for bfloat16 ones, of which only magnitudes below 2^-17 are rounded. Any
other weight, or a build of torch without FBGEMM, keeps float32. Values and build decide, never a clock: a choice by
timing would give other bits from one start to the next.

**Exact rows.** A matrix product's library picks its kernel by the number of rows, so the same row multiplied alone, among
three and among sixty-four can differ in the last bits. On the CPU a layer therefore runs only at *safe* row counts:
counts at which every row, wherever it stands, comes out with the same bits. `safe_row_counts` finds them by trying, once
for each kind, shape of weight and number of threads. A call pads its rows to the next safe count, and one with more rows
than the largest is cut up. In the worst case the only safe count is 1, rows run one by one, and the promise still holds.

(Seen with MKL's fp32 product on AVX2: 1; 2 and 3; 5 to 7 and 9 to 11 differ; 4, 8 and everything from 12 on agree. With
FBGEMM's fp16 product: 1, 2 and what leaves a tail of one or two rows, 7, 14, 31, 32, 37 ..., differ; the others agree.)
"""

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

Kind = Literal["fp16", "fp32"]
Multiply = Callable[[Tensor], Tensor]

PACKING_ERROR = 2.0**-25
"""The most that packing may change a weight: half the smallest float16 there is."""
CANDIDATES = (
    1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16, 18, 20, 24, 28, 30, 33, 36, 40, 48, 54, 60, 64, 66, 72, 84, 96, 108, 128, 144,
    168, 192, 240, 256, 288, 336, 384, 432, 480, 512, 516,
)  # fmt: skip
"""Row counts that are tried. Many are whole tiles of 4 or 6 rows; they lie close, which bounds the padding."""
PROBE_FLOPS = 4e9
"""A count whose single product costs more is not tried; this bounds the time a probe takes for a wide output layer."""


class Linear:
    """`x @ W.T + b` in float32; `is_exact`: each row's bits are a function of that row alone (CPU)."""

    kind: Kind
    row_counts: tuple[int, ...]
    """The safe ones; none where any count will do."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None = None, *, is_exact: bool = True) -> None:
        self.is_exact = is_exact
        self.load(weight_OD, bias_O)

    def load(self, weight_OD: Tensor, bias_O: Tensor | None = None) -> None:
        """Multiply by these float32 weights from now on. What is packed is a copy; float32 may share the caller's memory."""
        on_cpu = weight_OD.device.type == "cpu"
        self.kind = "fp16" if on_cpu and has_packing() and survives_packing(weight_OD) else "fp32"
        self.row_counts = safe_row_counts(self.kind, *weight_OD.shape) if on_cpu and self.is_exact else ()
        self._weight_OD = None if on_cpu else weight_OD
        self.bias_O, self._multiply = bias_O, _multiplier(self.kind, weight_OD)

    def __call__(self, x_ND: Tensor) -> Tensor:
        out_NO = _multiply_exactly(x_ND, self._multiply, self.row_counts) if self.row_counts else self._multiply(x_ND)
        return out_NO if self.bias_O is None else out_NO.add_(self.bias_O)


def survives_packing(weight_OD: Tensor) -> bool:
    """Whether float16 holds these weights to within `PACKING_ERROR`."""
    return bool(((weight_OD.half().float() - weight_OD).abs() <= PACKING_ERROR).all())


@cache
def has_packing() -> bool:
    """Whether this build of torch has FBGEMM's float16 product."""
    try:
        _multiplier("fp16", torch.zeros(8, 8))(torch.zeros(1, 8))
    except (AttributeError, RuntimeError):  # no such operator, or none for this processor
        return False
    return True


def safe_row_counts(kind: Kind, out_features: int, in_features: int) -> tuple[int, ...]:
    """The row counts, ascending, at which a row has the same bits wherever it stands; never empty."""
    return _probe(kind, out_features, in_features, torch.get_num_threads())


@cache
def _probe(kind: Kind, out_features: int, in_features: int, num_threads: int) -> tuple[int, ...]:
    """Multiply one random row, repeated, at each count; keep the largest set of counts with the same bits in all rows.

    What the values are does not matter to the order of the sums, so random ones stand for every layer of this shape.
    """
    generator = torch.Generator().manual_seed(0)
    weight_OD = torch.randn(out_features, in_features, generator=generator)
    row_D = torch.randn(in_features, generator=generator)
    multiply = _multiplier(kind, weight_OD)
    agreeing: dict[bytes, list[int]] = {}
    for count in CANDIDATES:
        if count > 1 and 2 * count * weight_OD.numel() > PROBE_FLOPS:
            break
        out_NO = multiply(row_D.repeat(count, 1))
        if bool((out_NO == out_NO[0]).all()):
            agreeing.setdefault(out_NO[0].numpy().tobytes(), []).append(count)
    return max((tuple(counts) for counts in agreeing.values()), key=lambda counts: (len(counts), counts[-1]))


def _multiplier(kind: Kind, weight_OD: Tensor) -> Multiply:
    """`x_ND @ weight_OD.T` in one of its kinds."""
    if kind == "fp32":
        weight_OD = weight_OD.contiguous()
        return lambda x_ND: F.linear(x_ND, weight_OD)
    packed = torch.ops.quantized.linear_prepack_fp16(weight_OD, None)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x_ND: multiply(x_ND, packed)


def _multiply_exactly(x_ND: Tensor, multiply: Multiply, row_counts: tuple[int, ...]) -> Tensor:
    rows, most = x_ND.shape[0], row_counts[-1]
    if rows > most:
        return torch.cat([_multiply_exactly(part, multiply, row_counts) for part in torch.split(x_ND, most)])
    count = next(count for count in row_counts if count >= rows)
    # A fresh tensor starts at an aligned address; a view into one might not, and a library may look at that.
    if rows == count and x_ND.storage_offset() == 0 and x_ND.is_contiguous():
        return multiply(x_ND)
    padded_ND = x_ND.new_zeros(count, x_ND.shape[1])
    padded_ND[:rows] = x_ND
    return multiply(padded_ND)[:rows]
