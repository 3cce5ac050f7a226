"""A batch: the chunks of a step as flat arrays, one row for each id that is computed.

Suffixes: N rows, G cache groups, S sequences, P pages of the longest table, M rows that sample.
"""

from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrt.core.tokens import IntArray
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
    counts_S = np.array([count for _, count in chunks])
    starts_S = np.array([sequence.lease.computed for sequence, _ in chunks])
    first_rows_S = np.cumsum(counts_S) - counts_S
    token_ids = IntArray("i")
    for (sequence, count), start in zip(chunks, starts_S.tolist(), strict=True):
        known = sequence.tokens.token_ids[start : start + count]
        token_ids += known
        token_ids.extend(sequence.draft.ids[: count - len(known)])
    positions_N = np.arange(len(token_ids)) + np.repeat(starts_S - first_rows_S, counts_S)
    out = [
        (first + row, sequence)
        for first, (sequence, count) in zip(first_rows_S.tolist(), chunks, strict=True)
        for row in _read(sequence, count)
    ]
    return Batch(
        np.array(token_ids, dtype=np.int64), positions_N, np.repeat(np.arange(len(chunks), dtype=np.int32), counts_S),
        tables_of([sequence.lease.table for sequence, _ in chunks]), np.array([row for row, _ in out], dtype=np.int64),
        [sequence for _, sequence in out],
    )  # fmt: skip


def tables_of(tables: List[List[IntArray]]) -> NDArray[np.int32]:
    """Page tables of equal length: what is short is filled up with places without a page."""
    longest = max(len(table[0]) for table in tables)
    tables_GSP = np.full((len(tables[0]), len(tables), longest), NONE, dtype=np.int32)
    for index, table in enumerate(tables):
        for group, row in enumerate(table):
            tables_GSP[group, index, : len(row)] = row
    return tables_GSP


def _read(sequence: Sequence, count: int) -> range:
    """Which of a chunk's rows are read: the last known id's and those of a draft; or, once, those before scored ids."""
    start = sequence.lease.computed
    if sequence.num_scored:
        return range(max(sequence.context_tokens - 1 + len(sequence.scores) - start, 0), count)
    return range(sequence.num_uncomputed - 1, count)
