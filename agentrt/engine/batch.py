"""A batch: the chunks of a step as flat arrays, one row for each id that is computed.

A branch of a draft is verified in a page table of its own, which holds the pages of its sequence up to where it leaves
them. So a row attends what lies in one table up to its position, in a tree as in a chain. What the first page of a branch
shares with others (the ids before it, from the start of that page on) is written there too by rows with *twins*.

Suffixes: N rows, G cache groups, S tables, P pages of the longest table, M rows that sample, W twins, T stretches.
"""

from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrt.core.tokens import IntArray
from agentrt.engine.kv.pages import NONE
from agentrt.engine.sequence import Sequence

NO_ROWS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class Batch(NamedTuple):
    """What a runner needs. Rows of one table are neighbours, in the order of their positions."""

    token_ids_N: NDArray[np.int64]
    positions_N: NDArray[np.int64]
    table_of_N: NDArray[np.int32]
    tables_GSP: NDArray[np.int32]
    """Page tables, a row for each cache group; -1 where there is no page. Behind a sequence's are those of its branches."""
    out_rows_M: NDArray[np.int64]
    """The rows whose logits are wanted, one for each entry of `readers`."""
    readers: list[Sequence]
    """Who samples from a row of logits, or scores the id that follows it."""
    twin_rows_W: NDArray[np.int64] = NO_ROWS
    """Rows whose KV is to be written to the pages of a second table too: those that a branch shares with what it left."""
    twin_tables_W: NDArray[np.int32] = NO_ROWS.astype(np.int32)


class _Stretch(NamedTuple):
    """Rows of one table that follow one another."""

    table: List[IntArray]
    start: int
    rows: int


def build_batch(chunks: List[tuple[Sequence, int]], page_size: int) -> Batch:
    """The batch that computes the next `count` ids of each sequence; their leases have the pages for it.

    What a count has beyond a sequence's known ids are ids of its draft, and its lease has tables for the branches of that.
    """
    token_ids, stretches, readers = IntArray("i"), list[_Stretch](), list[Sequence]()
    out, twins = list[int](), list[tuple[int, int]]()
    for sequence, count in chunks:
        lease, draft, first = sequence.lease, sequence.draft, len(token_ids)
        known = sequence.tokens.token_ids[lease.computed : lease.computed + count]
        token_ids += known
        before = len(out)
        out += [first + row for row in _read(sequence, len(known))]
        if lease.branches:
            last, order = first + len(known) - 1, draft.order()
            row_of = {place: last + 1 + row for row, place in enumerate(order)}
            token_ids.extend(draft.ids[place] for place in order)
            out += [row_of[place] for place in range(len(order))]
            twins += _twins(sequence, {-1: last, **row_of}, len(stretches), page_size)
            stretches += _stretches(sequence, len(known))
        else:
            token_ids.extend(draft.ids[: count - len(known)])
            out += range(first + len(known), first + count)
            stretches.append(_Stretch(lease.table, lease.computed, count))
        readers += [sequence] * (len(out) - before)
    tables, starts_T, rows_T = zip(*stretches, strict=True)
    first_rows_T = np.cumsum(rows_T) - rows_T
    twins_W2 = np.array(twins, dtype=np.int64).reshape(-1, 2)
    return Batch(
        np.array(token_ids, dtype=np.int64), np.arange(len(token_ids)) + np.repeat(starts_T - first_rows_T, rows_T),
        np.repeat(np.arange(len(stretches), dtype=np.int32), rows_T), tables_of(tables), np.array(out, dtype=np.int64),
        readers, twins_W2[:, 0], twins_W2[:, 1].astype(np.int32),
    )  # fmt: skip


def _stretches(sequence: Sequence, known: int) -> list[_Stretch]:
    """Those of a draft that branches, behind so many known ids: a stretch for each branch, in its own table."""
    lease, (main, *others) = sequence.lease, sequence.draft.branches()
    return [
        _Stretch(lease.table, lease.computed, known + len(main.ids)),
        *(
            _Stretch(table, lease.computed + known + len(branch.above), len(branch.ids))
            for branch, table in zip(others, lease.branches, strict=True)
        ),
    ]


def _twins(sequence: Sequence, row_of: Mapping[int, int], table: int, page_size: int) -> list[tuple[int, int]]:
    """Rows that branches share with what they left, and the tables to write them to; the sequence's own is number `table`.

    `row_of` are the rows of its last id (-1) and of those of its draft.
    """
    found, computed = list[tuple[int, int]](), sequence.lease.computed
    for number, branch in enumerate(sequence.draft.branches()[1:], start=table + 1):
        own = (computed + 1 + len(branch.above)) // page_size * page_size
        for position, place in enumerate((-1, *branch.above), start=computed):
            if position >= own:
                found.append((row_of[place], number))
    return found


def tables_of(tables: List[List[IntArray]]) -> NDArray[np.int32]:
    """Page tables of equal length: what is short is filled up with places without a page."""
    longest = max(len(table[0]) for table in tables)
    tables_GSP = np.full((len(tables[0]), len(tables), longest), NONE, dtype=np.int32)
    for index, table in enumerate(tables):
        for group, row in enumerate(table):
            tables_GSP[group, index, : len(row)] = row
    return tables_GSP


def _read(sequence: Sequence, count: int) -> range:
    """Which rows of a chunk's known ids are read: the last one's; or, once, those before scored ids."""
    start = sequence.lease.computed
    if sequence.num_scored:
        return range(max(sequence.context_tokens - 1 + len(sequence.scores) - start, 0), count)
    return range(sequence.num_uncomputed - 1, count)
