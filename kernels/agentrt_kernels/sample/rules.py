"""What the sampling law takes besides logits: a rule for each row, and a batch of them as arrays.

Penalties, bias and banned ids touch few ids of a large vocabulary, so they are *edits*: ids, and what
applies to each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GREEDY_BELOW = 1e-5
"""Temperatures below it take the most likely id."""


class Edits(NamedTuple):
    """Parallel arrays over ids, no id twice."""

    ids_E: NDArray[np.int64]
    bias_E: NDArray[np.float64]
    """Added first; -inf bans the id."""
    counts_E: NDArray[np.int64]
    """Times the id is in this turn's output, for presence and frequency penalty."""
    seen_E: NDArray[np.bool_]
    """Whether it is in prompt or output, for the repetition penalty."""


NO_EDITS = Edits(np.empty(0, np.int64), np.empty(0, np.float64), np.empty(0, np.int64), np.empty(0, np.bool_))


class Rule(NamedTuple):
    """The law's parameters for one row. The defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    """0 and below mean off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    edits: Edits = NO_EDITS

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


EDITS = Rule._fields.index("edits")
"""The numbers come before it."""


class Rules(NamedTuple):
    """The rules of B rows as arrays; row b's edits are the entries `[starts[b], starts[b + 1])`."""

    temperature_B: NDArray[np.float64]
    top_k_B: NDArray[np.int64]
    top_p_B: NDArray[np.float64]
    min_p_B: NDArray[np.float64]
    repetition_penalty_B: NDArray[np.float64]
    presence_penalty_B: NDArray[np.float64]
    frequency_penalty_B: NDArray[np.float64]
    starts: NDArray[np.int64]
    ids_E: NDArray[np.int64]
    bias_E: NDArray[np.float64]
    counts_E: NDArray[np.int64]
    seen_E: NDArray[np.bool_]

    @classmethod
    def of(cls, rules: Sequence[Rule]) -> "Rules":
        """The batch of these rows. Made in every step, so in few calls: after a step of a model each of them is slow."""
        numbers = np.array([rule[:EDITS] for rule in rules], dtype=np.float64).reshape(-1, EDITS)
        temperature_B, top_k_B, top_p_B, min_p_B, repetition_B, presence_B, frequency_B = np.ascontiguousarray(
            numbers.T
        )
        starts, edited = np.zeros(len(rules) + 1, dtype=np.int64), [rule.edits for rule in rules]
        edits = NO_EDITS
        if any(some is not NO_EDITS for some in edited):
            np.cumsum([len(some.ids_E) for some in edited], out=starts[1:])
            edits = Edits(*map(np.concatenate, zip(*edited, strict=True)))
        return cls(
            temperature_B,
            top_k_B.astype(np.int64),
            top_p_B,
            min_p_B,
            repetition_B,
            presence_B,
            frequency_B,
            starts,
            *edits,
        )

    def row(self, index: int) -> Rule:
        """The rule of one row."""
        some = slice(self.starts[index], self.starts[index + 1])
        return Rule(
            temperature=float(self.temperature_B[index]),
            top_k=int(self.top_k_B[index]),
            top_p=float(self.top_p_B[index]),
            min_p=float(self.min_p_B[index]),
            repetition_penalty=float(self.repetition_penalty_B[index]),
            presence_penalty=float(self.presence_penalty_B[index]),
            frequency_penalty=float(self.frequency_penalty_B[index]),
            edits=Edits(self.ids_E[some], self.bias_E[some], self.counts_E[some], self.seen_E[some]),
        )


class Drawn(NamedTuple):
    """What was sampled for B rows."""

    ids_B: NDArray[np.int64]
    """-1 where the logits hold NaN or +inf, or every id is masked; the row's other entries are NaN then."""
    logprobs_B: NDArray[np.float64]
    """Under the law sampled from; for a greedy row under the untempered one."""
    raw_logprobs_B: NDArray[np.float64]
    """Under the softmax of the untouched logits of the ids below `vocab_size`."""
    kept_logmass_B: NDArray[np.float64]
    """Log of the tempered mass that min-p, top-k and top-p left: tempered logprob = logprob + kept_logmass."""


class Scored(NamedTuple):
    """What the law says of ids that were not drawn now: B rows, of each the K most likely ids."""

    logprobs_B: NDArray[np.float64]
    """Of the row's id, as `Drawn` has it; -inf if the law cuts it, NaN if the row cannot be sampled from."""
    top_ids_BK: NDArray[np.int64]
    """The most likely first, of equally likely ones the lower id; -1 where the law leaves no more."""
    top_logprobs_BK: NDArray[np.float64]
