"""From the logits of a step to one id for each sequence, under the one law.

The law and the noise are `agentrt_kernels.sample`; here each sequence's parameters and history become its rule.
"""

import math
from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrt.engine.sequence import Sequence
from agentrt_kernels.sample.cpu import sample as draw
from agentrt_kernels.sample.reference import probabilities
from agentrt_kernels.sample.rules import NO_EDITS, Edits, Rule, Rules


class Drawn(NamedTuple):
    """One sampled id; -1 if the logits held NaN."""

    token_id: int
    logprob: float
    raw_logprob: float
    kept_logmass: float


def sample(logits_MV: NDArray[np.float32], sequences: List[Sequence], vocab_size: int) -> list[Drawn]:
    """Draw an id for each sequence from its row. Only ids below `vocab_size` are drawn."""
    seeds_M = np.array([sequence.seed for sequence in sequences], dtype=np.uint64)
    positions_M = np.array([len(sequence.tokens) for sequence in sequences], dtype=np.int64)
    drawn = draw(logits_MV, vocab_size, Rules.of([rule_of(sequence) for sequence in sequences]), seeds_M, positions_M)
    return [Drawn(*row) for row in zip(*(column.tolist() for column in drawn), strict=True)]


def score(logits_V: NDArray[np.float32], sequence: Sequence, vocab_size: int) -> float:
    """The logprob of the id that a sequence scores next; at temperature 0 the untempered one, as sampling records it."""
    rule = rule_of(sequence)
    p_V = probabilities(logits_V, rule._replace(temperature=1.0) if rule.is_greedy else rule, vocab_size)
    p = float(p_V[sequence.next_scored])
    return math.log(p) if p > 0 else -math.inf


def rule_of(sequence: Sequence) -> Rule:
    """The law's parameters for the next id of a sequence, its history included."""
    params = sequence.params
    return Rule(
        params.temperature, params.top_k, params.top_p, params.min_p,
        params.repetition_penalty, params.presence_penalty, params.frequency_penalty, _edits(sequence),
    )  # fmt: skip


def _edits(sequence: Sequence) -> Edits:
    """What applies to single ids: bias, bans (end ids before `min_tokens`) and the counts that penalties need."""
    params = sequence.params
    bias = dict(params.logit_bias)
    if sequence.num_sampled < params.min_tokens:
        bias |= dict.fromkeys(params.stop_token_ids, -np.inf)
    ids = set(bias)
    if params.presence_penalty or params.frequency_penalty:
        ids |= sequence.counts.keys()
    if params.repetition_penalty != 1:
        ids |= sequence.seen
    if not ids:
        return NO_EDITS
    order = sorted(ids)
    return Edits(
        np.array(order, dtype=np.int64),
        np.array([bias.get(token_id, 0.0) for token_id in order], dtype=np.float64),
        np.array([sequence.counts[token_id] for token_id in order], dtype=np.int64),
        np.array([token_id in sequence.seen for token_id in order], dtype=np.bool_),
    )
