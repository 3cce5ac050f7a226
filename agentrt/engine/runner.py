"""A runner: the decoder on its device and the flat buffer that the pages lie in."""

import time

import numpy as np
import torch
from numpy.typing import NDArray

from agentrt.core.spec import EngineSpec
from agentrt.engine.batch import Batch
from agentrt.engine.model.decoder import Decoder

PROBE_ROWS, PROBE_KEYS, PROBE_RUNS = 32, 1024, 2


class ModelRunner:
    """`engine.step.Runner` over a decoder. The buffer is one flat tensor, a page of all layers contiguous in it."""

    def __init__(self, decoder: Decoder, spec: EngineSpec) -> None:
        self.decoder, self.page_size = decoder, spec.page_size
        self.num_pages = -(-spec.kv_tokens // spec.page_size)
        self._layout = decoder.page_layout(spec.page_size)
        self._pool = torch.zeros(self.num_pages * self._layout.page_stride, dtype=torch.float32, device=decoder.device)
        self.cost_per_key = self._measured_cost_per_key()

    def run(self, batch: Batch) -> NDArray[np.float32]:
        token_ids_N, positions_N, table_of_N, tables_SP, out_rows_M = (
            torch.from_numpy(array).to(self.decoder.device) for array in batch[:5]
        )
        logits_MV = self.decoder.forward(
            token_ids_N, positions_N, table_of_N, tables_SP, self._pool, self._layout, out_rows_M
        )
        logits: NDArray[np.float32] = logits_MV.cpu().numpy()
        return logits

    def copy_page(self, source: int, target: int) -> None:
        self._page(target).copy_(self._page(source))

    def _measured_cost_per_key(self) -> float:
        """Time rows that attend few keys and rows that attend many; what a key adds, in rows. Compiles, on the way."""
        pages = min(PROBE_KEYS // self.page_size, self.num_pages)
        few, many = self._probe(0, pages), self._probe(max(pages * self.page_size - PROBE_ROWS, 0), pages)
        seconds: dict[int, list[float]] = {0: [], 1: []}
        for attempt in range(PROBE_RUNS + 1):
            for which, batch in enumerate((few, many)):
                started = time.perf_counter()
                self.run(batch)
                if attempt:  # the first one compiles
                    seconds[which].append(time.perf_counter() - started)
        ratio = min(seconds[1]) / min(seconds[0])
        keys = int(many.positions_N[0] - few.positions_N[0])
        return max(ratio - 1, 0.0) / keys if keys else 0.0

    def _probe(self, start: int, pages: int) -> Batch:
        """A prompt chunk at positions from `start` on, in pages that hold nothing yet."""
        rows = min(PROBE_ROWS, pages * self.page_size)
        return Batch(
            np.zeros(rows, dtype=np.int64), np.arange(start, start + rows, dtype=np.int64), np.zeros(rows, dtype=np.int32),
            np.arange(pages, dtype=np.int32)[None], np.array([rows - 1], dtype=np.int64), [],
        )  # fmt: skip

    def _page(self, page: int) -> torch.Tensor:
        stride = self._layout.page_stride
        return self._pool[page * stride : (page + 1) * stride]
