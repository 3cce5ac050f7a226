"""Which rows meet which keys in one program: the plan of a step's attention, made on the host once for all layers.

An *item* is neighbouring rows and a stretch of keys that lie in the same pages for all of them. A prompt chunk's rows
are cut into tiles. A decode row's keys are cut at fixed positions, so that one long context is many items; decode rows
that stand side by side and have the same pages in a stretch (siblings with a common prompt, at any depth of their
tree) are one item there, and those pages are read once. Cuts depend on positions alone, so a row's sums are in the same
order whoever its neighbours are.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DECODE_KEYS = 512
"""A decode row's keys are cut at multiples of it."""
CHUNK_KEYS = 4096
"""A prompt chunk's likewise: its tiles have more rows to share the reading."""


class Plan(NamedTuple):
    """Suffixes: I items, N rows, C the most parts of a row."""

    items_I5: NDArray[np.int32]
    """First row, rows, first key, the key after the last, slot. Item's row r leaves its part in slot + r; -1: no parts."""
    slots_NC: NDArray[np.int32]
    """The slots of each row's parts in the order of its keys, then -1. Only -1 for a row that one item has whole."""
    num_slots: int


def plan_attention(
    positions_N: NDArray[np.int64], table_of_N: NDArray[np.int32], tables_SP: NDArray[np.int32], page_size: int,
    tile_rows: int,
) -> Plan:  # fmt: skip
    """The plan of a step's rows: those of one sequence are neighbours, in the order of their positions.

    `tables_SP` are the tables of the cache group that keeps every id: where two of its pages are the same, every
    group's are. No item has more than `tile_rows` rows. `ValueError` if `page_size` does not divide `DECODE_KEYS`.
    """
    if DECODE_KEYS % page_size:
        raise ValueError(f"page_size must divide {DECODE_KEYS}, but it is {page_size}")
    starts_R = np.flatnonzero(np.diff(table_of_N, prepend=-1))
    counts_R = np.diff(starts_R, append=len(table_of_N))
    is_decode_R = counts_R == 1
    keys_a_part_N = np.repeat(np.where(is_decode_R, DECODE_KEYS, CHUNK_KEYS), counts_R)
    slots_NC = np.full((len(positions_N), _parts(positions_N + 1, keys_a_part_N).max()), -1, dtype=np.int32)
    decodes_D = starts_R[is_decode_R]
    items = [_plan_decodes(decodes_D, positions_N, tables_SP[table_of_N[decodes_D]], page_size, tile_rows, slots_NC)]
    num_slots = int(slots_NC.max()) + 1
    for start, count in zip(starts_R[~is_decode_R].tolist(), counts_R[~is_decode_R].tolist(), strict=True):
        for row in range(start, start + count, tile_rows):
            rows = min(tile_rows, start + count - row)
            items.append(_plan_tile(row, rows, int(positions_N[row + rows - 1]) + 1, num_slots, slots_NC))
            num_slots = max(num_slots, int(slots_NC[row : row + rows].max()) + 1)
    return Plan(np.concatenate(items), slots_NC, num_slots)


def _parts(keys: NDArray[np.int64], keys_a_part: NDArray[np.int64]) -> NDArray[np.int64]:
    return -(-keys // keys_a_part)


def _plan_tile(row: int, rows: int, stop: int, slot: int, slots_NC: NDArray[np.int32]) -> NDArray[np.int32]:
    """Items of some rows of a prompt chunk, of which the last sees `stop` keys."""
    parts = -(-stop // CHUNK_KEYS)
    if parts == 1:
        return np.array([[row, rows, 0, stop, -1]], dtype=np.int32)
    first_C = np.arange(parts) * CHUNK_KEYS
    slots_C = slot + np.arange(parts) * rows
    slots_NC[row : row + rows, :parts] = slots_C + np.arange(rows)[:, None]
    columns = (np.full(parts, row), np.full(parts, rows), first_C, np.minimum(first_C + CHUNK_KEYS, stop), slots_C)
    return np.stack(columns, axis=1).astype(np.int32)


def _plan_decodes(
    rows_D: NDArray[np.int64], positions_N: NDArray[np.int64], tables_DP: NDArray[np.int32], page_size: int,
    tile_rows: int, slots_NC: NDArray[np.int32],
) -> NDArray[np.int32]:  # fmt: skip
    """Items of the decode rows, part by part (C), within a part row by row (D)."""
    stops_D = positions_N[rows_D] + 1
    first_C = np.arange(_parts(stops_D, np.array(DECODE_KEYS)).max(initial=0)) * DECODE_KEYS
    there_CD = first_C[:, None] < stops_D
    in_parts_CD = there_CD & (stops_D > DECODE_KEYS)
    slots_CD = np.where(in_parts_CD, np.cumsum(in_parts_CD).reshape(in_parts_CD.shape) - 1, -1)
    slots_NC[rows_D, : len(first_C)] = slots_CD.T
    full_CD = in_parts_CD & (first_C[:, None] + DECODE_KEYS <= stops_D)
    joined_CD = full_CD & _same_pages(tables_DP, len(first_C), DECODE_KEYS // page_size)
    joined_CD[:, 1:] &= full_CD[:, :-1] & (np.diff(rows_D) == 1)
    place_CD = np.arange(len(rows_D)) - np.maximum.accumulate(np.where(joined_CD, 0, np.arange(len(rows_D))), axis=1)
    c, d = np.nonzero(there_CD)
    leads = np.flatnonzero(place_CD[c, d] % tile_rows == 0)
    counts = np.diff(leads, append=len(c))
    c, d = c[leads], d[leads]
    stops = np.minimum(first_C[c] + DECODE_KEYS, stops_D[d])
    return np.stack((rows_D[d], counts, first_C[c], stops, slots_CD[c, d]), axis=1).astype(np.int32)


def _same_pages(tables_DP: NDArray[np.int32], parts: int, pages: int) -> NDArray[np.bool_]:
    """`same_CD`: whether a row's pages of a part are those of the row before it."""
    padded_DP = np.full((len(tables_DP), parts * pages), -1, dtype=np.int32)
    width = min(parts * pages, tables_DP.shape[1])
    padded_DP[:, :width] = tables_DP[:, :width]
    pages_DCp = padded_DP.reshape(len(tables_DP), parts, pages)
    same_CD = np.zeros((parts, len(tables_DP)), dtype=np.bool_)
    same_CD[:, 1:] = (pages_DCp[1:] == pages_DCp[:-1]).all(axis=2).T
    return same_CD
