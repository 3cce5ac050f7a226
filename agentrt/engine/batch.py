"""A batch: the chunks of a step as flat arrays, one row for each id that is computed.

Suffixes: N rows, S sequences, P pages of the longest table, M rows that sample.
"""

from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrt.engine.sequence import Sequence


class Batch(NamedTuple):
    """What a runner needs. Rows of one sequence are neighbours, in the order of their positions."""

    token_ids_N: NDArray[np.int64]
    positions_N: NDArray[np.int64]
    table_of_N: NDArray[np.int32]
    tables_SP: NDArray[np.int32]
    """Page tables, padded with -1."""
    out_rows_M: NDArray[np.int64]
    """The rows whose logits are wanted, one for each sequence of `sampling`."""
    sampling: list[Sequence]


def build_batch(chunks: List[tuple[Sequence, int]]) -> Batch:
    """The batch that computes the next `count` ids of each sequence; their leases have the pages for it."""
    counts = [count for _, count in chunks]
    token_ids, positions = [], []
    tables_SP = np.full((len(chunks), max(len(sequence.lease.pages) for sequence, _ in chunks)), -1, dtype=np.int32)
    for index, (sequence, count) in enumerate(chunks):
        start = sequence.lease.computed
        token_ids.append(np.array(sequence.tokens.token_ids[start : start + count], dtype=np.int64))
        positions.append(np.arange(start, start + count, dtype=np.int64))
        tables_SP[index, : len(sequence.lease.pages)] = sequence.lease.pages
    last_rows = np.cumsum(counts) - 1
    sampling = [index for index, (sequence, count) in enumerate(chunks) if count == sequence.num_uncomputed]
    return Batch(
        np.concatenate(token_ids), np.concatenate(positions), np.repeat(np.arange(len(chunks), dtype=np.int32), counts),
        tables_SP, last_rows[sampling], [chunks[index][0] for index in sampling],
    )  # fmt: skip
