"""From the logits of a step to one id for each sequence, under the one law.

The law and the noise are `agentrt_kernels.sample`; here each sequence's parameters and history become its rule. A rule that
cannot be had, because a grammar fails, and a row that cannot be sampled from end one request and touch no other.
"""

from collections.abc import Collection
from collections.abc import Sequence as List
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agentrt.core.protocol import Grammar
from agentrt.engine.sequence import Sequence
from agentrt_kernels.sample import cpu
from agentrt_kernels.sample.rules import NO_EDITS, Edits, Rule, Rules
from agentrt_kernels.sample.rules import Drawn as DrawnRows

Logits = NDArray[np.float32] | Tensor
"""A runner's: in memory, or on its device."""
NO_IDS = np.empty(0, dtype=np.int64)


class GrammarError(ValueError):
    """A grammar raised, or what it gave says of no id that it is allowed."""


class Lawful(NamedTuple):
    """What the law is for each of some rows."""

    rules: list[Rule]
    errors: list[str]
    """Why a rule cannot be had; empty where it can."""
    positions: list[int]
    """Absolute, of the id that the row gives."""


class Drawn(NamedTuple):
    """One sampled id, or why there is none."""

    token_id: int
    logprob: float
    raw_logprob: float
    kept_logmass: float
    top_logprobs: dict[int, float] = {}
    error: str = ""


def laws_of(readers: List[Sequence], vocab_size: int) -> Lawful:
    """The law at each row. Rows of one sequence are neighbours: after its last id, then after each id of its draft."""
    laws = Lawful([], [], [])
    for sequence, rows in groupby(readers):
        draft, count, start = sequence.draft, sum(1 for _ in rows), len(sequence.tokens)
        if draft.parents:
            laws.positions.extend(start + len(draft.path(row)) for row in range(count))
        else:
            laws.positions.extend(range(start, start + count))
        same = 1 if sequence.has_memory else count
        for row in range(0, count, same):
            for place in draft.path(row):
                sequence.suppose(draft.ids[place])
            rule, error = _rule(sequence, vocab_size)
            sequence.retract()
            laws.rules.extend([rule] * same)
            laws.errors.extend([error] * same)
    return laws


def sample(logits_MV: Logits, sequences: List[Sequence], laws: Lawful, vocab_size: int) -> list[Drawn]:
    """Draw an id from each row for its sequence. Only ids below `vocab_size` are drawn."""
    rules, errors, positions = laws
    seeds_M = np.array([sequence.seed for sequence in sequences], dtype=np.uint64)
    positions_M = np.array(positions, dtype=np.int64)
    columns = draw(logits_MV, vocab_size, Rules.of(rules), seeds_M, positions_M)
    drawn = [Drawn(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    for row, one in enumerate(drawn):
        if errors[row] or one.token_id < 0:
            drawn[row] = one._replace(error=errors[row] or _why_none(on_host(logits_MV[row, :vocab_size])))
        elif count := sequences[row].params.top_logprobs:
            drawn[row] = one._replace(top_logprobs=_most_likely(on_host(logits_MV[row]), rules[row], count, vocab_size))
    return drawn


def drawn_instead(drawn: Drawn, token_id: int, logits_V: NDArray[np.float32], rule: Rule, vocab_size: int) -> Drawn:
    """As if `token_id` had been drawn from this row instead."""
    scored = cpu.score(logits_V[None], vocab_size, Rules.of([rule]), np.array([token_id]))
    raw_logprob = drawn.raw_logprob + float(logits_V[token_id]) - float(logits_V[drawn.token_id])
    return drawn._replace(token_id=token_id, logprob=float(scored.logprobs_B[0]), raw_logprob=raw_logprob)


def score(logits_MV: Logits, sequences: List[Sequence], vocab_size: int) -> None:
    """Give each sequence the logprob of the id that it scores next, a row after the other; or say why there is none.

    It is what sampling that id would have recorded: under the law, at temperature 0 under the untempered one, and -inf for
    an id that the law cuts.
    """
    rules, errors, ids = [], [], []
    for sequence in sequences:  # a rule looks at the history, so each is made before the next id joins it
        rule, error = _rule(sequence, vocab_size)
        rules.append(rule)
        errors.append(error)
        ids.append(sequence.next_scored())
    scored = cpu.score(on_host(logits_MV), vocab_size, Rules.of(rules), np.array(ids, dtype=np.int64))
    for row, (sequence, logprob) in enumerate(zip(sequences, scored.logprobs_B.tolist(), strict=True)):
        if errors[row] or np.isnan(logprob):
            sequence.error = sequence.error or errors[row] or _why_none(on_host(logits_MV[row, :vocab_size]))
        else:
            sequence.score(logprob)


def draw(logits_MV: Logits, *law: Any) -> DrawnRows:
    """As `agentrt_kernels.sample.reference.sample`, wherever the logits are."""
    if not isinstance(logits_MV, Tensor):
        return cpu.sample(logits_MV, *law)
    from agentrt_kernels.sample import launch  # Triton, which a machine without a GPU need not have

    return launch.sample(logits_MV, *law)


def on_host(logits: Logits) -> NDArray[np.float32]:
    """For what is asked of few rows."""
    return logits.float().cpu().numpy() if isinstance(logits, Tensor) else logits


def _most_likely(logits_V: NDArray[np.float32], rule: Rule, count: int, vocab_size: int) -> dict[int, float]:
    """The `count` most likely ids under the law, with their logprobs; fewer if the law leaves fewer."""
    count = min(count, vocab_size)
    scored = cpu.score(logits_V[None], vocab_size, Rules.of([rule]), np.zeros(1, dtype=np.int64), count)
    pairs = zip(scored.top_ids_BK[0].tolist(), scored.top_logprobs_BK[0].tolist(), strict=True)
    return {token_id: logprob for token_id, logprob in pairs if token_id >= 0}


def _why_none(logits_V: NDArray[np.float32]) -> str:
    if np.isfinite(logits_V.max()):
        return "no id may come next: logit_bias, bad_words, min_tokens and the grammar together forbid all"
    return "the model gave logits that are no numbers (NaN; with engine.kv=fp16 also where keys or values exceed 65504)"


def _rule(sequence: Sequence, vocab_size: int) -> tuple[Rule, str]:
    """The law's parameters for the next id of a sequence, its history included; or why they cannot be had."""
    params = sequence.params
    try:
        edits = _edits(sequence, vocab_size)
    except GrammarError as error:
        return Rule(), str(error)
    return Rule(
        params.temperature, params.top_k, params.top_p, params.min_p,
        params.repetition_penalty, params.presence_penalty, params.frequency_penalty, edits,
    ), ""  # fmt: skip


def _edits(sequence: Sequence, vocab_size: int) -> Edits:
    """What applies to single ids: bias, masks, and the counts that penalties need."""
    params = sequence.params
    bias = params.logit_bias | dict.fromkeys(sequence.forbidden_ids(), -np.inf)
    counts = sequence.counts if params.presence_penalty or params.frequency_penalty else {}
    if not (bias or counts or sequence.seen or sequence.grammar):
        return NO_EDITS
    forbidden = NO_IDS if sequence.grammar is None else _forbidden(sequence.grammar, sequence.turn_ids, vocab_size)
    ids = bias.keys() | counts.keys() | sequence.seen
    ids_E = np.union1d(np.fromiter(ids, np.int64, len(ids)), forbidden)
    size = len(ids_E)
    edits = Edits(ids_E, np.zeros(size), np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.bool_))
    edits.bias_E[_places(ids_E, bias)] = list(bias.values())
    edits.bias_E[np.searchsorted(ids_E, forbidden)] = -np.inf
    edits.counts_E[_places(ids_E, counts)] = list(counts.values())
    edits.seen_E[_places(ids_E, sequence.seen)] = True
    return edits


def _places(ids_E: NDArray[np.int64], some: Collection[int]) -> NDArray[np.intp]:
    """Where these are in a sorted array that holds them all."""
    return np.searchsorted(ids_E, np.fromiter(some, np.int64, len(some)))


def _forbidden(grammar: Grammar, turn_ids: List[int], vocab_size: int) -> NDArray[np.int64]:
    """The ids that a grammar does not allow next."""
    try:
        allowed = grammar(turn_ids)
        if allowed is None:
            return NO_IDS
        if isinstance(allowed, np.ndarray) and allowed.dtype == np.bool_:
            mask_V = allowed
        else:
            ids_A = np.fromiter(allowed, dtype=np.int64)
            if (ids_A < 0).any():
                raise IndexError(f"{ids_A.min()} is no id")
            mask_V = np.zeros(vocab_size, dtype=np.bool_)
            mask_V[ids_A] = True
    except KeyboardInterrupt:  # of whoever steps an engine in the main thread
        raise
    except BaseException as error:  # the caller's code: what it raises, Rust's panics too, is its request's failure
        raise GrammarError(f"the grammar failed after {len(turn_ids)} ids of the turn: {error!r}") from error
    if mask_V.shape != (vocab_size,):
        raise GrammarError(f"the grammar gave a mask of shape {mask_V.shape}, and this model has {vocab_size} ids")
    if not mask_V.any():
        raise GrammarError(f"the grammar allows no id after {len(turn_ids)} ids of the turn")
    return np.flatnonzero(~mask_V)
