"""Linear layers whose rows do not know their neighbours.

A matrix product's library picks its kernel by the number of rows, so the same row multiplied alone, among three and
among sixty-four can differ in the last bits. On the CPU a layer therefore runs only at *safe* row counts: counts at
which every row, wherever it stands, comes out with the same bits. `safe_row_counts` finds them by trying, once for
each shape of weight and number of threads. A call pads its rows to the next safe count, and one with more rows than
the largest is cut up. In the worst case the only safe count is 1, rows run one by one, and the promise still holds.

(Seen with MKL's fp32 product on AVX2: 1; 2 and 3; 5 to 7 and 9 to 11 differ; 4, 8 and everything from 12 on agree.)
"""

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

CANDIDATES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Row counts that are tried; from 8 on each is at most half more than the one before, which bounds the padding."""
PROBE_FLOPS = 4e9
"""A count whose single product costs more is not tried; this bounds the time a probe takes for a wide output layer."""


class Linear:
    """`x @ W.T + b` in float32; on the CPU each row's bits are a function of that row alone."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None = None) -> None:
        self.weight_OD, self.bias_O = weight_OD.contiguous(), bias_O
        self.row_counts = safe_row_counts(self.weight_OD) if weight_OD.device.type == "cpu" else ()

    def __call__(self, x_ND: Tensor) -> Tensor:
        if self.row_counts:
            out_NO = _multiply_exactly(x_ND, self.weight_OD, self.row_counts)
        else:
            out_NO = F.linear(x_ND, self.weight_OD)
        return out_NO if self.bias_O is None else out_NO.add_(self.bias_O)


def safe_row_counts(weight_OD: Tensor) -> tuple[int, ...]:
    """The row counts, ascending, at which a row has the same bits wherever it stands; never empty."""
    out_features, in_features = weight_OD.shape
    return _probe(out_features, in_features, torch.get_num_threads())


@cache
def _probe(out_features: int, in_features: int, num_threads: int) -> tuple[int, ...]:
    """Multiply one random row, repeated, at each count; keep the largest set of counts with the same bits in all rows.

    What the values are does not matter to the order of the sums, so random ones stand for every layer of this shape.
    """
    generator = torch.Generator().manual_seed(0)
    weight_OD = torch.randn(out_features, in_features, generator=generator)
    row_D = torch.randn(in_features, generator=generator)
    agreeing: dict[bytes, list[int]] = {}
    for count in CANDIDATES:
        if count > 1 and 2 * count * weight_OD.numel() > PROBE_FLOPS:
            break
        out_NO = F.linear(row_D.repeat(count, 1), weight_OD)
        if bool((out_NO == out_NO[0]).all()):
            agreeing.setdefault(out_NO[0].numpy().tobytes(), []).append(count)
    return max((tuple(counts) for counts in agreeing.values()), key=lambda counts: (len(counts), counts[-1]))


def _multiply_exactly(x_ND: Tensor, weight_OD: Tensor, row_counts: tuple[int, ...]) -> Tensor:
    rows, most = x_ND.shape[0], row_counts[-1]
    if rows > most:
        return torch.cat([_multiply_exactly(part, weight_OD, row_counts) for part in torch.split(x_ND, most)])
    count = next(count for count in row_counts if count >= rows)
    # A fresh tensor starts at an aligned address; a view into one might not, and a library may look at that.
    if rows == count and x_ND.storage_offset() == 0 and x_ND.is_contiguous():
        return F.linear(x_ND, weight_OD)
    padded_ND = x_ND.new_zeros(count, x_ND.shape[1])
    padded_ND[:rows] = x_ND
    return F.linear(padded_ND, weight_OD)[:rows]
