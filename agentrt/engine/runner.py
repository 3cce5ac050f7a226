"""A runner: the decoder on its device and the flat buffer that the pages lie in."""

import numpy as np
import torch
from numpy.typing import NDArray

from agentrt.core.spec import EngineSpec
from agentrt.engine.batch import Batch
from agentrt.engine.model.decoder import Decoder


class ModelRunner:
    """`engine.step.Runner` over a decoder. The buffer is one flat tensor, a page of all layers contiguous in it."""

    def __init__(self, decoder: Decoder, spec: EngineSpec) -> None:
        self.decoder, self.page_size = decoder, spec.page_size
        self.num_pages = -(-spec.kv_tokens // spec.page_size)
        self._layout = decoder.page_layout(spec.page_size)
        self._pool = torch.zeros(self.num_pages * self._layout.page_stride, dtype=torch.float32, device=decoder.device)

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

    def _page(self, page: int) -> torch.Tensor:
        stride = self._layout.page_stride
        return self._pool[page * stride : (page + 1) * stride]
