"""A batch: the chunks of a step as flat arrays, one row for each id that is computed.

Suffixes: N rows, G cache groups, S sequences, P pages of the longest table, M rows that sample.
"""

from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrt.engine.kv.pages import NONE
from agentrt.engine.sequence import Sequence


class Batch(NamedTuple):
    """What a runner needs. Rows of one sequence are neighbours, in the order of their positions."""

    token_ids_N: NDArray[np.int64]
    positions_N: NDArray[np.int64]
    table_of_N: NDArray[np.int32]
    tables_GSP: NDArray[np.int32]
    """Page tables, a row for each cache group; -1 where there is no page."""
    out_rows_M: NDArray[np.int64]
    """The rows whose logits are wanted, one for each entry of `readers`."""
    readers: list[Sequence]
    """Who samples from a row of logits, or scores the id that follows it."""


def build_batch(chunks: List[tuple[Sequence, int]]) -> Batch:
    """The batch that computes the next `count` ids of each sequence; their leases have the pages for it.

    What a count has beyond a sequence's known ids are ids of its draft.
    """
    counts = [count for _, count in chunks]
    token_ids, positions = [], []
    tables = [sequence.lease.table for sequence, _ in chunks]
    tables_GSP = np.full((len(tables[0]), len(tables), max(len(table[0]) for table in tables)), NONE, dtype=np.int32)
    for index, (sequence, count) in enumerate(chunks):
        start = sequence.lease.computed
        ids = sequence.tokens.token_ids[start : start + count]
        ids.extend(sequence.draft.ids[: count - len(ids)])
        token_ids.append(np.array(ids, dtype=np.int64))
        positions.append(np.arange(start, start + count, dtype=np.int64))
        for group, row in enumerate(tables[index]):
            tables_GSP[group, index, : len(row)] = row
    first_rows = np.cumsum([0, *counts[:-1]])
    out = [
        (first + row, sequence)
        for first, (sequence, count) in zip(first_rows, chunks, strict=True)
        for row in _read(sequence, count)
    ]
    return Batch(
        np.concatenate(token_ids), np.concatenate(positions), np.repeat(np.arange(len(chunks), dtype=np.int32), counts),
        tables_GSP, np.array([row for row, _ in out], dtype=np.int64), [sequence for _, sequence in out],
    )  # fmt: skip


def _read(sequence: Sequence, count: int) -> range:
    """Which of a chunk's rows are read: the last known id's and those of a draft; or, once, those before scored ids."""
    start = sequence.lease.computed
    if sequence.num_scored:
        return range(max(sequence.context_tokens - 1 + len(sequence.scores) - start, 0), count)
    return range(sequence.num_uncomputed - 1, count)
