"""The sampling law on a GPU: the reference's ids for equal logits, without a sort of the vocabulary.

A row is float64 weights w_i = e^(x_i - max), of which the dropped ones become 0, as in `cpu.py`. Logits stay on the
device; four numbers a row come back, in one copy.
"""

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from agentrt_kernels.sample.kernel import BLOCK, cut_kernel, race_kernel
from agentrt_kernels.sample.reference import SLACK
from agentrt_kernels.sample.rules import GREEDY_BELOW, Drawn, Rules


def sample(
    logits_BV: Tensor, vocab_size: int, rules: Rules, seeds_B: NDArray[np.uint64], positions_B: NDArray[np.int64]
) -> Drawn:
    """Draw one id for each row. `positions_B` is the absolute position that the id will have."""
    x_BV = logits_BV[:, :vocab_size].double()
    raw_peak_B, raw_total_B = _peak_and_total(x_BV)
    if len(rules.ids_E):
        _edit(x_BV, rules)
    peak_B, processed_total_B = _peak_and_total(x_BV)
    is_greedy = rules.temperature_B < GREEDY_BELOW
    temperature_B = _on(logits_BV, np.where(is_greedy, 1.0, rules.temperature_B))
    w_BV = ((x_BV - peak_B[:, None]) / temperature_B[:, None]).exp_()
    total_B = w_BV.sum(dim=1)
    kept_B = torch.where(_on(logits_BV, is_greedy), total_B, _cut(w_BV, total_B, rules, is_greedy))
    ids_B = _race(w_BV, seeds_B, positions_B)
    of_id = ids_B[:, None]
    logprobs_B = (x_BV.gather(1, of_id)[:, 0] - peak_B) / temperature_B - kept_B.log()
    raw_logprobs_B = logits_BV.gather(1, of_id)[:, 0].double() - raw_peak_B - raw_total_B.log()
    columns_4B = torch.stack([ids_B.double(), logprobs_B, raw_logprobs_B, (kept_B / total_B).log()])
    columns_4B[:, ~(peak_B.isfinite() & processed_total_B.isfinite())] = torch.nan
    columns = columns_4B.cpu().numpy()
    return Drawn(np.where(np.isnan(columns[0]), -1, columns[0]).astype(np.int64), columns[1], columns[2], columns[3])


def _on(like: Tensor, array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device, non_blocking=True)


def _peak_and_total(x_BV: Tensor) -> tuple[Tensor, Tensor]:
    peak_B = x_BV.amax(dim=1)
    return peak_B, (x_BV - peak_B[:, None]).exp_().sum(dim=1)


def _edit(x_BV: Tensor, rules: Rules) -> None:
    """Bias, penalties and bans, in place, for the ids that have any."""
    rows_E = np.repeat(np.arange(len(rules.starts) - 1), np.diff(rules.starts))
    known = rules.ids_E < x_BV.shape[1]
    rows_E, ids_E, counts_E = rows_E[known], rules.ids_E[known], rules.counts_E[known]
    presence_E = np.where(counts_E > 0, rules.presence_penalty_B[rows_E], 0.0)
    less_E = _on(x_BV, presence_E), _on(x_BV, rules.frequency_penalty_B[rows_E] * counts_E)
    penalty_E = _on(x_BV, np.where(rules.seen_E[known], rules.repetition_penalty_B[rows_E], 1.0))
    place = _on(x_BV, rows_E), _on(x_BV, ids_E)
    x_E = x_BV[place] + _on(x_BV, rules.bias_E[known])
    x_E = torch.where(x_E > 0, x_E / penalty_E, x_E * penalty_E)
    x_BV[place] = x_E - less_E[0] - less_E[1]


def _cut(w_BV: Tensor, total_B: Tensor, rules: Rules, is_greedy: NDArray[np.bool_]) -> Tensor:
    """Drop what min-p, top-k and top-p drop, in place, and all but the first id of a greedy row; the mass kept."""
    off = np.full(len(is_greedy), np.inf)
    min_p_B = np.where(is_greedy, 0.0, rules.min_p_B)
    if min_p_B.any():
        w_BV.masked_fill_(w_BV < _on(w_BV, min_p_B * (1.0 - SLACK))[:, None], 0.0)
        total_B = w_BV.sum(dim=1)
    top_k_B = np.where(is_greedy, 1, rules.top_k_B)
    if (top_k_B > 0).any():
        top_k_B = np.where(top_k_B > 0, top_k_B, w_BV.shape[1]).astype(np.int64)
        total_B = _keep_ranked(w_BV, total_B, _on(w_BV, top_k_B), _on(w_BV, off))
    top_p_B = np.where(is_greedy, 1.0, rules.top_p_B)
    if (top_p_B < 1.0).any():
        all_B = torch.full_like(total_B, w_BV.shape[1], dtype=torch.int64)
        masses_B = torch.where(_on(w_BV, top_p_B < 1.0), total_B * _on(w_BV, top_p_B * (1.0 - SLACK)), _on(w_BV, off))
        total_B = _keep_ranked(w_BV, total_B, all_B, masses_B)
    return total_B


def _keep_ranked(w_BV: Tensor, total_B: Tensor, counts_B: Tensor, masses_B: Tensor) -> Tensor:
    kept_B = total_B.clone()
    cut_kernel[(len(w_BV),)](w_BV, counts_B, masses_B, kept_B, w_BV.shape[1], BLOCK=BLOCK, num_warps=8)
    return kept_B


def _race(w_BV: Tensor, seeds_B: NDArray[np.uint64], positions_B: NDArray[np.int64]) -> Tensor:
    rows, vocab = w_BV.shape
    speeds_BC = w_BV.new_empty(rows, triton.cdiv(vocab, BLOCK))
    ids_BC = torch.empty_like(speeds_BC, dtype=torch.int64)
    race_kernel[speeds_BC.shape](
        w_BV, _on(w_BV, seeds_B.view(np.int64)), _on(w_BV, positions_B), speeds_BC, ids_BC, vocab, BLOCK=BLOCK
    )
    fastest_B1 = speeds_BC.amax(dim=1, keepdim=True)
    return ids_BC.masked_fill_(speeds_BC < fastest_B1, vocab).amin(dim=1).clamp_(max=vocab - 1)
