"""A toy model for engine tests: its KV is the ids themselves, its logits a given function of them.

Whatever the engine does with pages (share, fork, evict, preempt), the logits are computed from the ids found *through the
page table*. A page that holds somebody else's ids therefore changes what is sampled.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from agentrt.core.errors import WeightsError
from agentrt.core.protocol import WeightSource
from agentrt.core.seeds import derive
from agentrt.engine.batch import Batch
from agentrt.engine.kv.group import Group
from agentrt.engine.kv.pages import PageCopy
from agentrt.engine.kv.tiers import Host
from agentrt.testing.copier import FaultyCopier

Logits = Callable[[Sequence[int]], Sequence[float] | NDArray[np.float32]]


UPDATE_BITS = 32
"""KV of a toy is the id, and above these bits how many updates came before it was made."""


def hashed_logits(vocab_size: int, spread: float = 3.0, salt: int = 0) -> Logits:
    """Logits that depend on every id before and on their order; each `salt` gives another policy."""

    def logits(prefix: Sequence[int]) -> NDArray[np.float32]:
        seed = derive(salt, *prefix)
        return (np.random.default_rng(seed).standard_normal(vocab_size) * spread).astype(np.float32)

    return logits


class ToyRunner:
    """An `engine.step.Runner` over given logits. `prefixes` records what each sampling row saw.

    In a group with a window, a row that samples must find the ids that group 0 has there. `host_pages` of each group, moved
    by `copier`, make a host tier; a page of a group counts as one byte.
    """

    def __init__(
        self, logits: Logits, *, num_pages: int = 64, page_size: int = 4, groups: Sequence[Group] = (), host_pages: int = 0,
        copier: FaultyCopier | None = None,
    ) -> None:  # fmt: skip
        self.groups, self.page_size, self._logits = tuple(groups) or (Group(num_pages),), page_size, logits
        self._kv = [np.full((group.num_pages, page_size), -1, dtype=np.int64) for group in self.groups]
        self.copier = copier or FaultyCopier()
        self.copier.device = self._kv
        self.copier.host = [np.full((host_pages, page_size), -1, dtype=np.int64) for _ in self.groups]
        self.host = Host([host_pages] * len(self.groups), [1] * len(self.groups), self.copier)
        self.num_updates = 0
        self.keeps_kv = False
        """An update may leave KV of older weights in use; otherwise a row that sees any is an error."""
        self.cost_per_key = 0.0
        self.prefixes: list[list[int]] = []
        self.rows: list[int] = []
        """How many rows each step had."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.rows.append(len(batch.token_ids_N))
        tables_GNP = batch.tables_GSP[:, batch.table_of_N]
        rows = [*range(len(batch.token_ids_N)), *batch.twin_rows_W]
        for kv, table_SP in zip(self._kv, batch.tables_GSP, strict=True):
            for row, table in zip(rows, [*batch.table_of_N, *batch.twin_tables_W], strict=True):
                position = batch.positions_N[row]
                page = table_SP[table, position // self.page_size]
                assert page >= 0, "a row has no page"
                kv[page, position % self.page_size] = batch.token_ids_N[row] + (self.num_updates << UPDATE_BITS)
        prefixes = [self._read(tables_GNP[:, row], int(batch.positions_N[row]) + 1) for row in batch.out_rows_M]
        self.prefixes += prefixes
        return np.array([self._logits(prefix) for prefix in prefixes], dtype=np.float32)

    def copy_page(self, copy: PageCopy) -> None:
        kv = self._kv[copy.group]
        kv[copy.target] = kv[copy.source]

    def stage(self, source: WeightSource) -> Callable[[], None]:
        """`source` holds new `logits`; KV that the old ones made is told from what the new ones make."""
        if not isinstance(source, dict) or not callable(source.get("logits")):
            raise WeightsError("logits is missing from the new weights")

        def install() -> None:
            self._logits = source["logits"]
            self.num_updates += 1

        return install

    def _read(self, tables_GP: NDArray[np.int32], tokens: int) -> list[int]:
        """The ids that a row sees, which the windows must agree on."""
        prefix: list[int] = []
        for group, kv, table in zip(self.groups, self._kv, tables_GP, strict=True):
            first = (max(0, tokens - group.window) if group.window else 0) // self.page_size
            pages = table[first : -(-tokens // self.page_size)]
            made = kv[pages].reshape(-1)[: tokens - first * self.page_size]
            seen = (made & (1 << UPDATE_BITS) - 1).tolist()
            assert (pages >= 0).all(), "a window lacks a page"
            assert self.keeps_kv or (made >> UPDATE_BITS == self.num_updates).all(), "a row sees KV of old weights"
            prefix = prefix or seen
            assert seen == prefix[first * self.page_size :], "a window holds other ids"
        return prefix
