"""A toy model for engine tests: its KV is the ids themselves, its logits a given function of them.

Whatever the engine does with pages (share, fork, evict, preempt), the logits are computed from the ids found *through the
page table*. A page that holds somebody else's ids therefore changes what is sampled.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from agentrt.core.seeds import derive
from agentrt.engine.batch import Batch

Logits = Callable[[Sequence[int]], Sequence[float] | NDArray[np.float32]]


def hashed_logits(vocab_size: int, spread: float = 3.0) -> Logits:
    """Logits that depend on every id before and on their order."""

    def logits(prefix: Sequence[int]) -> NDArray[np.float32]:
        seed = derive(0, *prefix)
        return (np.random.default_rng(seed).standard_normal(vocab_size) * spread).astype(np.float32)

    return logits


class ToyRunner:
    """An `engine.step.Runner` over given logits. `prefixes` records what each sampling row saw."""

    def __init__(self, logits: Logits, *, num_pages: int = 64, page_size: int = 4) -> None:
        self.num_pages, self.page_size, self._logits = num_pages, page_size, logits
        self.cost_per_key = 0.0
        self._kv = np.full((num_pages, page_size), -1, dtype=np.int64)
        self.prefixes: list[list[int]] = []
        self.rows: list[int] = []
        """How many rows each step had."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.rows.append(len(batch.token_ids_N))
        tables_N = batch.tables_SP[batch.table_of_N]
        for token_id, position, table in zip(batch.token_ids_N, batch.positions_N, tables_N, strict=True):
            page = table[position // self.page_size]
            assert page >= 0, "a row has no page"
            self._kv[page, position % self.page_size] = token_id
        prefixes = [self._read(tables_N[row], int(batch.positions_N[row]) + 1) for row in batch.out_rows_M]
        self.prefixes += prefixes
        return np.array([self._logits(prefix) for prefix in prefixes], dtype=np.float32)

    def copy_page(self, source: int, target: int) -> None:
        self._kv[target] = self._kv[source]

    def _read(self, table: NDArray[np.int32], tokens: int) -> list[int]:
        pages = table[: -(-tokens // self.page_size)]
        return [int(token_id) for token_id in self._kv[pages].reshape(-1)[:tokens]]
