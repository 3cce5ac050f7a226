"""Rows of sequences that share pages stand next to one another, and each reader keeps its row."""

import numpy as np

from agentrt.engine.batch import Batch
from agentrt.engine.runner import side_by_side


def test_rows_that_share_pages_are_neighbours() -> None:
    tables_GSP = np.array([[[1, 2, 9], [5, 6, 7], [1, 2, 3], [5, 6, 8], [1, 4, -1]]], dtype=np.int32)
    table_of_N = np.array([0, 0, 1, 2, 3, 4], dtype=np.int32)
    batch = Batch(np.arange(10, 16), np.array([8, 9, 9, 9, 9, 5]), table_of_N, tables_GSP, np.array([1, 2, 4, 5]), [])
    sorted_batch = side_by_side(batch)
    assert sorted_batch.table_of_N.tolist() == [2, 0, 0, 4, 1, 3]
    assert sorted_batch.token_ids_N.tolist() == [13, 10, 11, 15, 12, 14]
    assert sorted_batch.positions_N.tolist() == [9, 8, 9, 5, 9, 9]
    assert sorted_batch.token_ids_N[sorted_batch.out_rows_M].tolist() == [11, 12, 14, 15]
    assert sorted_batch.tables_GSP is tables_GSP
