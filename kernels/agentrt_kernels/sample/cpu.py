"""The sampling law, compiled: the reference's numbers to 1e-12, without a sort of the vocabulary.

A row is one task and one stretch of float64 weights w_i = e^(x_i - max), of which the dropped ones become 0. The cuts
look at weights in bins of an eighth of an octave; only the bin in which a cut falls is sorted.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrt_kernels.compiled import exp64, inner, ordered, ordered_bits, reducing, spread
from agentrt_kernels.sample.reference import SLACK
from agentrt_kernels.sample.rules import GREEDY_BELOW, Drawn, Rules, Scored

BINS = 1024
"""Eight an octave; weights below 2^-128 share the last one."""
LANES = 32
"""Counters of the noise that are computed side by side; each is four ids."""
SHORTEST_RACE = 2.9e-8
"""Below the least E there is, -log(1 - 2^-25)."""


def sample(
    logits_BV: NDArray[np.float32],
    vocab_size: int,
    rules: Rules,
    seeds_B: NDArray[np.uint64],
    positions_B: NDArray[np.int64],
) -> Drawn:
    """Draw one id for each row. `positions_B` is the absolute position that the id will have."""
    drawn = Drawn(np.full(len(logits_BV), -1), *(np.full(len(logits_BV), np.nan) for _ in range(3)))
    logits_BV = np.ascontiguousarray(logits_BV)
    spread(_sample, len(logits_BV), 5.0 * logits_BV.size, logits_BV, vocab_size, rules, seeds_B, positions_B, drawn)
    return drawn


def score(
    logits_BV: NDArray[np.float32], vocab_size: int, rules: Rules, ids_B: NDArray[np.int64], count: int = 0
) -> Scored:
    """The logprob that sampling would record for each row's id, and those of the row's `count` most likely ids."""
    shape = (len(logits_BV), count)
    scored = Scored(np.full(len(logits_BV), np.nan), np.full(shape, -1), np.full(shape, -np.inf))
    logits_BV = np.ascontiguousarray(logits_BV)
    spread(_score, len(logits_BV), 5.0 * logits_BV.size, logits_BV, vocab_size, rules, ids_B, scored)
    return scored


@ordered()
def _sample(
    begin: int, end: int, logits_BV: Any, vocab_size: int, rules: Any, seeds_B: Any, positions_B: Any, drawn: Any
) -> None:
    width = min(vocab_size, logits_BV.shape[1])
    x_V, w_V = np.empty(width, dtype=np.float64), np.empty(width, dtype=np.float64)
    for row in range(begin, end):
        _sample_row(logits_BV[row][:vocab_size], rules, row, seeds_B[row], positions_B[row], drawn, x_V, w_V)


@inner(inline="always")
def _sample_row(logits_V: Any, rules: Any, row: int, seed: Any, position: int, drawn: Any, x_V: Any, w_V: Any) -> None:
    peak, total, raw_peak, raw_total = _process(logits_V, rules, row, x_V, w_V)
    if not (math.isfinite(peak) and math.isfinite(total)):
        return
    temperature = rules.temperature_B[row]
    mass, kept = _temper_and_cut(x_V, peak, total, w_V, rules, row)
    token = _first(x_V, peak) if temperature < GREEDY_BELOW else _race(w_V, seed, position)
    drawn.ids_B[row] = token
    scale = 1.0 if temperature < GREEDY_BELOW else temperature
    drawn.logprobs_B[row] = (x_V[token] - peak) / scale - math.log(kept)
    drawn.raw_logprobs_B[row] = np.float64(logits_V[token]) - raw_peak - math.log(raw_total)
    drawn.kept_logmass_B[row] = math.log(kept / mass)


@ordered()
def _score(begin: int, end: int, logits_BV: Any, vocab_size: int, rules: Any, ids_B: Any, scored: Any) -> None:
    for row in range(begin, end):
        _score_row(logits_BV[row][:vocab_size], rules, row, ids_B[row], scored)


@inner()
def _score_row(logits_V: Any, rules: Any, row: int, token: int, scored: Any) -> None:
    x_V, w_V = np.empty(logits_V.shape[0], dtype=np.float64), np.empty(logits_V.shape[0], dtype=np.float64)
    peak, total, _, _ = _process(logits_V, rules, row, x_V, w_V)
    if not (math.isfinite(peak) and math.isfinite(total)):
        return
    temperature = rules.temperature_B[row]
    _, kept = _temper_and_cut(x_V, peak, total, w_V, rules, row)
    scale = 1.0 if temperature < GREEDY_BELOW else temperature
    scored.logprobs_B[row] = (x_V[token] - peak) / scale - math.log(kept) if w_V[token] > 0.0 else -math.inf
    top_K, logprobs_K = scored.top_ids_BK[row], scored.top_logprobs_BK[row]
    for place in range(_most_likely(w_V, top_K)):
        logprobs_K[place] = (x_V[top_K[place]] - peak) / scale - math.log(kept)


@inner()
def _most_likely(w_V: Any, top_K: Any) -> int:
    """Put the first ids of the ranking, as far as they have a weight, into `top_K`; how many they are."""
    found = 0
    for v in range(w_V.shape[0] if top_K.shape[0] > 0 else 0):
        if w_V[v] == 0.0 or (found == top_K.shape[0] and w_V[v] <= w_V[top_K[found - 1]]):
            continue
        place = min(found, top_K.shape[0] - 1)
        while place > 0 and w_V[v] > w_V[top_K[place - 1]]:
            top_K[place] = top_K[place - 1]
            place -= 1
        top_K[place] = v
        found = min(found + 1, top_K.shape[0])
    return found


@inner(inline="always")
def _process(logits_V: Any, rules: Any, row: int, x_V: Any, w_V: Any) -> Any:
    """The logits, edited, in `x_V`, and their weights in `w_V`; largest value and sum of weights, edited and untouched."""
    peak = _peak(logits_V)
    for v in range(x_V.shape[0]):
        x_V[v] = logits_V[v]
    total = _exponentials(x_V, peak, 1.0, w_V)
    raw_peak, raw_total = peak, total
    if rules.starts[row + 1] > rules.starts[row]:
        peak = _edit(x_V, rules, row)
        total = _exponentials(x_V, peak, 1.0, w_V)
    return peak, total, raw_peak, raw_total


@inner(inline="always")
def _temper_and_cut(x_V: Any, peak: float, total: float, w_V: Any, rules: Any, row: int) -> Any:
    """Leave in `w_V` what is sampled from; the mass of all ids and that of the kept ones, the most likely id's being 1.

    A greedy row has its untempered weights, which are those that it records.
    """
    temperature = rules.temperature_B[row]
    if temperature < GREEDY_BELOW:
        return total, total
    if temperature != 1.0:
        total = _exponentials(x_V, peak, 1.0 / temperature, w_V)
    kept = total
    if rules.min_p_B[row] > 0.0:
        kept = _keep_at_least(w_V, rules.min_p_B[row] * (1.0 - SLACK))
    if 0 < rules.top_k_B[row] < w_V.shape[0]:
        kept = _keep_ranked(w_V, rules.top_k_B[row], math.inf)
    if rules.top_p_B[row] < 1.0:
        kept = _keep_ranked(w_V, w_V.shape[0], kept * rules.top_p_B[row] * (1.0 - SLACK))
    return total, kept


@inner()
def _edit(x_V: Any, rules: Any, row: int) -> float:
    """Apply the row's edits; the largest value then."""
    for e in range(rules.starts[row], rules.starts[row + 1]):
        token = rules.ids_E[e]
        if token < x_V.shape[0]:
            x = x_V[token] + rules.bias_E[e]
            if rules.seen_E[e]:
                penalty = rules.repetition_penalty_B[row]
                x = x / penalty if x > 0 else x * penalty
            presence = rules.presence_penalty_B[row] if rules.counts_E[e] > 0 else 0.0
            x_V[token] = x - presence - rules.frequency_penalty_B[row] * rules.counts_E[e]
    peak = -math.inf
    for x in x_V:
        if x > peak:
            peak = x
    return peak


@inner()
def _peak(logits_V: Any) -> float:
    """The largest logit, by comparing integers, which is vector code; a NaN comes out as NaN or is passed over."""
    best = np.int32(-2147483648)
    for bits in logits_V.view(np.int32):
        best = max(best, ordered_bits(bits))
    return np.float64(np.int32(ordered_bits(best)).view(np.float32))


@reducing()
def _exponentials(x_V: Any, peak: float, scale: float, w_V: Any) -> float:
    """w = e^((x - peak) * scale); returns their sum, which is NaN if any is."""
    total = 0.0
    for v in range(w_V.shape[0]):
        w = exp64((x_V[v] - peak) * scale)
        w_V[v] = w
        total += w
    return total


@inner()
def _first(x_V: Any, peak: float) -> int:
    for v in range(x_V.shape[0]):
        if x_V[v] == peak:
            return v
    return -1


@inner()
def _keep_at_least(w_V: Any, least: float) -> float:
    kept = 0.0
    for v in range(w_V.shape[0]):
        if w_V[v] < least:
            w_V[v] = 0.0
        kept += w_V[v]
    return kept


@inner()
def _bin(w: float) -> Any:
    """0 for 1, one more for each eighth of an octave down."""
    return min((np.int64(0x3FF0000000000000) - np.float64(w).view(np.int64)) >> np.int64(49), np.int64(BINS - 1))


@inner()
def _keep_ranked(w_V: Any, count: int, mass: float) -> float:
    """Keep the first ids of the ranking, at most `count` and until `mass` stands before an id; the mass kept."""
    count_of, mass_of = np.empty(BINS, dtype=np.int64), np.empty(BINS, dtype=np.float64)
    for b in range(BINS):
        count_of[b], mass_of[b] = 0, 0.0
    for v in range(w_V.shape[0]):
        b = _bin(w_V[v])
        count_of[b] += 1
        mass_of[b] += w_V[v]
    cut, above, before = 0, 0, 0.0
    while cut < BINS - 1 and above + count_of[cut] <= count and before + mass_of[cut] < mass:
        above += count_of[cut]
        before += mass_of[cut]
        cut += 1
    tied = np.empty(count_of[cut], dtype=np.int64)
    found = np.int64(0)
    for v in range(w_V.shape[0]):
        b = _bin(w_V[v])
        if b == cut and w_V[v] > 0.0:
            tied[found] = v
            found += 1
        elif b > cut:
            w_V[v] = 0.0
    for root in range(found // 2 - 1, -1, -1):
        _sift(tied, w_V, root, found)
    while found > 0 and above < count and before < mass:
        above += 1
        before += w_V[tied[0]]
        found -= 1
        tied[0] = tied[found]
        _sift(tied, w_V, np.int64(0), found)
    for v in tied[:found]:
        w_V[v] = 0.0
    return before


@inner()
def _sift(heap: Any, w_V: Any, root: Any, size: Any) -> None:
    """Put the id at `root` in its place in a heap whose top is the first in the ranking."""
    while True:
        child = 2 * root + 1
        if child >= size:
            return
        if child + 1 < size and _ranks_before(w_V, heap[child + 1], heap[child]):
            child += 1
        if not _ranks_before(w_V, heap[child], heap[root]):
            return
        heap[root], heap[child] = heap[child], heap[root]
        root = child


@inner()
def _ranks_before(w_V: Any, a: int, b: int) -> bool:
    return w_V[a] > w_V[b] or (w_V[a] == w_V[b] and a < b)


@inner()
def _race(w_V: Any, seed: Any, position: int) -> int:
    """The winner of the race, argmax w / E. Most ids are out before a logarithm is taken, as -log(u) > 1 - u."""
    best, winner = 0.0, -1
    words_4L, products_2L = np.empty((4, LANES), dtype=np.uint64), np.empty((2, LANES), dtype=np.uint64)
    u_I, none_I = np.empty(4 * LANES, dtype=np.float64), np.empty(4 * LANES, dtype=np.float64)
    for i in range(4 * LANES):
        none_I[i] = 1.0 - SHORTEST_RACE
    for start in range(0, w_V.shape[0], 4 * LANES):
        w_I = w_V[start : start + 4 * LANES]
        if _hopeful(w_I, none_I, best) == 0:
            continue
        for lane in range(LANES):
            words_4L[0, lane], words_4L[1, lane] = np.uint64(start // 4 + lane), np.uint64(position)
            words_4L[2, lane], words_4L[3, lane] = np.uint64(0), np.uint64(0)
        philox(words_4L, products_2L, seed)
        for lane in range(LANES):
            for word in range(4):
                u_I[4 * lane + word] = (np.float64(np.int32(words_4L[word, lane] >> np.uint64(8))) + 0.5) / 16777216.0
        if _hopeful(w_I, u_I, best * (1.0 - SLACK)) == 0:
            continue
        for i in range(w_I.shape[0]):
            if w_I[i] > best * (1.0 - u_I[i]) * (1.0 - SLACK):
                speed = w_I[i] / -math.log(u_I[i])
                if speed > best:
                    best, winner = speed, start + i
    return winner


@inner()
def _hopeful(w_I: Any, u_I: Any, best: float) -> int:
    """How many may still win."""
    count = 0
    for i in range(w_I.shape[0]):
        count += w_I[i] > best * (1.0 - u_I[i])
    return count


@ordered()
def philox(words_4L: Any, products_2L: Any, seed: Any) -> None:
    """Philox4x32-10 of each lane's counter, in its place; the key is the seed's two halves. Lane by lane is vector code."""
    low32, shift, lanes = np.uint64(0xFFFFFFFF), np.uint64(32), words_4L.shape[1]
    key_low, key_high = seed & low32, seed >> shift
    for _ in range(10):
        for lane in range(lanes):
            products_2L[0, lane] = (words_4L[0, lane] & low32) * np.uint64(0xD2511F53)
            products_2L[1, lane] = (words_4L[2, lane] & low32) * np.uint64(0xCD9E8D57)
        for lane in range(lanes):
            words_4L[0, lane] = (products_2L[1, lane] >> shift) ^ words_4L[1, lane] ^ key_low
            words_4L[2, lane] = (products_2L[0, lane] >> shift) ^ words_4L[3, lane] ^ key_high
            words_4L[1, lane], words_4L[3, lane] = products_2L[1, lane] & low32, products_2L[0, lane] & low32
        key_low, key_high = (key_low + np.uint64(0x9E3779B9)) & low32, (key_high + np.uint64(0xBB67AE85)) & low32
