"""The sampling law: from logits to the distribution a token is drawn from, and the draw. This is the definition.

Order: bias, repetition penalty, presence and frequency penalty, masks (ids from `vocab_size` on, banned ids),
temperature, min-p, top-k, renormalise, top-p, renormalise; all in float64. Ids are ranked by probability, equal ones
by the lower id. A temperature below 1e-5 takes the first id of that ranking and the cuts play no part; its recorded
logprob is the untempered one.

The draw is an exponential race, argmax p_i / E_i with E_i = -log(u_i), lowest id on ties. u_i is a 24-bit uniform in
(0, 1) that depends on the turn's seed, the token's absolute position and the id, and on nothing else.
"""

import numpy as np
from numpy.typing import NDArray

from agentrt_kernels.sample.rules import Drawn, Rule, Rules, Scored

SLACK = 1e-12
"""Relative: a cut that falls on a boundary must not hang on the last bit of a sum."""
SAMPLING_STREAM = 0
"""The last word of the noise counter; other uses of the same seed take other streams."""

Floats = NDArray[np.float64]


def probabilities(logits_V: NDArray[np.float32], rule: Rule, vocab_size: int) -> Floats:
    """THE law: `p_V`, which sums to 1. A greedy rule gives all to one id. NaN if the row cannot be sampled from."""
    processed_V = process(logits_V, rule, vocab_size)
    if rule.is_greedy:
        return _one_hot(int(np.argmax(processed_V)), len(processed_V))
    p_V = softmax(processed_V / rule.temperature)
    p_V = np.where(p_V >= rule.min_p * (1.0 - SLACK) * p_V.max(), p_V, 0.0)
    order_V = np.argsort(-p_V, kind="stable")
    if 0 < rule.top_k < len(p_V):
        p_V[order_V[rule.top_k :]] = 0.0
    p_V /= p_V.sum()
    if rule.top_p < 1.0:
        ranked_V = p_V[order_V]
        before_V = np.cumsum(ranked_V) - ranked_V
        p_V[order_V[before_V >= rule.top_p * (1.0 - SLACK)]] = 0.0
        p_V /= p_V.sum()
    return p_V


def _one_hot(token: int, vocab: int) -> Floats:
    p_V = np.zeros(vocab)
    p_V[token] = 1.0
    return p_V


def process(logits_V: NDArray[np.float32], rule: Rule, vocab_size: int) -> Floats:
    """The logits after bias, penalties and masks: what the temperature divides."""
    x_V = mask(logits_V, vocab_size)
    for token, bias, count, seen in zip(*rule.edits, strict=True):
        x = x_V[token] + bias
        if seen:
            x = x / rule.repetition_penalty if x > 0 else x * rule.repetition_penalty
        x_V[token] = x - (rule.presence_penalty if count > 0 else 0.0) - rule.frequency_penalty * count
    return x_V


def mask(logits_V: NDArray[np.float32], vocab_size: int) -> Floats:
    """The untouched logits, with -inf where the tokenizer knows no such id."""
    x_V: Floats = logits_V.astype(np.float64)
    x_V[vocab_size:] = -np.inf
    return x_V


def sample(
    logits_BV: NDArray[np.float32],
    vocab_size: int,
    rules: Rules,
    seeds_B: NDArray[np.uint64],
    positions_B: NDArray[np.int64],
) -> Drawn:
    """Draw one id for each row. `positions_B` is the absolute position that the id will have."""
    rows = [
        _sample_row(logits_BV[row], vocab_size, rules.row(row), int(seeds_B[row]), int(positions_B[row]))
        for row in range(len(logits_BV))
    ]
    columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return Drawn(columns[0].astype(np.int64), columns[1], columns[2], columns[3])


def _sample_row(
    logits_V: NDArray[np.float32], vocab_size: int, rule: Rule, seed: int, position: int
) -> tuple[int, float, float, float]:
    processed_V, raw_V = process(logits_V, rule, vocab_size), mask(logits_V, vocab_size)
    if not np.isfinite(processed_V.max()):
        return -1, np.nan, np.nan, np.nan
    p_V = probabilities(logits_V, rule, vocab_size)
    tempered_V = softmax(processed_V if rule.is_greedy else processed_V / rule.temperature)
    kept = np.flatnonzero(p_V)
    token = int(kept[np.argmax(p_V[kept] / race_times(seed, position, kept))])
    raw_logprob = np.log(softmax(raw_V)[token])
    if rule.is_greedy:
        return token, np.log(tempered_V[token]), raw_logprob, 0.0
    return token, np.log(p_V[token]), raw_logprob, np.log(tempered_V[kept].sum())


def score(
    logits_BV: NDArray[np.float32], vocab_size: int, rules: Rules, ids_B: NDArray[np.int64], count: int = 0
) -> Scored:
    """The logprob that sampling would record for each row's id, and those of the row's `count` most likely ids."""
    rows = [
        _score_row(logits_BV[row], vocab_size, rules.row(row), int(ids_B[row]), count) for row in range(len(logits_BV))
    ]
    return Scored(
        np.array([row[0] for row in rows], dtype=np.float64),
        np.array([row[1] for row in rows], dtype=np.int64).reshape(len(rows), count),
        np.array([row[2] for row in rows], dtype=np.float64).reshape(len(rows), count),
    )


def _score_row(
    logits_V: NDArray[np.float32], vocab_size: int, rule: Rule, token: int, count: int
) -> tuple[float, NDArray[np.int64], Floats]:
    ids, logprobs = np.full(count, -1), np.full(count, -np.inf)
    if not np.isfinite(process(logits_V, rule, vocab_size).max()):
        return np.nan, ids, logprobs
    p_V = probabilities(logits_V, _recorded(rule), vocab_size)
    ranked = [v for v in np.argsort(-p_V, kind="stable")[:count] if p_V[v] > 0]
    ids[: len(ranked)], logprobs[: len(ranked)] = ranked, np.log(p_V[ranked])
    with np.errstate(divide="ignore"):
        return float(np.log(p_V[token])), ids, logprobs


def _recorded(rule: Rule) -> Rule:
    """The rule whose logprobs are recorded: a greedy one's are untempered, and no cut plays a part."""
    return rule._replace(temperature=1.0, min_p=0.0, top_k=0, top_p=1.0) if rule.is_greedy else rule


def softmax(x_V: Floats) -> Floats:
    """e^x over its sum."""
    e_V: Floats = np.exp(x_V - x_V.max())
    e_V /= e_V.sum()
    return e_V


def race_times(seed: int, position: int, token_ids: NDArray[np.int64], stream: int = SAMPLING_STREAM) -> Floats:
    """The exponential E of each id: a function of (seed, position, id, stream)."""
    counter_N4 = np.zeros((len(token_ids), 4), dtype=np.uint64)
    counter_N4[:, 0], counter_N4[:, 1], counter_N4[:, 3] = token_ids // 4, position, stream
    words_N4 = philox4x32(counter_N4, (seed & 0xFFFFFFFF, seed >> 32))
    bits_N = words_N4[np.arange(len(token_ids)), token_ids % 4]
    times_N: Floats = -np.log(((bits_N >> np.uint64(8)) + 0.5) / 2.0**24)
    return times_N


def philox4x32(counter_N4: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al. 2011): four random 32-bit words for each counter, all held in uint64."""
    low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b, c, d = (counter_N4[:, word] for word in range(4))
    for turn in range(10):
        key_low = np.uint64((key[0] + turn * 0x9E3779B9) & 0xFFFFFFFF)
        key_high = np.uint64((key[1] + turn * 0xBB67AE85) & 0xFFFFFFFF)
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (second >> shift) ^ b ^ key_low, second & low32, (first >> shift) ^ d ^ key_high, first & low32
    return np.stack([a, b, c, d], axis=1)
