"""A runner: the decoder on its device and the flat buffers that the pages lie in."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt.core.protocol import WeightSource
from agentrt.core.spec import EngineSpec
from agentrt.engine.batch import Batch
from agentrt.engine.kv.copier import HostMover, Mover, ThreadCopier
from agentrt.engine.kv.group import size_groups, size_host
from agentrt.engine.kv.pages import PageCopy
from agentrt.engine.kv.tiers import Host, no_host
from agentrt.engine.model.causal import CausalModel
from agentrt.engine.model.decoder import PagedKV, Twins
from agentrt.engine.model.experts import held_type
from agentrt.engine.sampler import Logits
from agentrt.engine.speculate.drafter import DraftModel
from agentrt.engine.speculate.head import Step
from agentrt.engine.weights import Install, staged
from agentrt_kernels.pages import PageLayout

PROBE_ROWS, PROBE_KEYS, PROBE_RUNS = 32, 1024, 2


class ModelRunner:
    """`engine.step.Runner` over a model. Each cache group has one flat tensor, a page contiguous in it."""

    SPARE_PAGES = 0
    """Pages at the end of each tensor that no sequence gets."""

    def __init__(self, decoder: CausalModel, spec: EngineSpec) -> None:
        self.decoder, self.page_size = decoder, spec.page_size
        self.taps: tuple[int, ...] = ()
        """After which numbers of layers `run` hands out hidden states."""
        self.features_NF: Tensor | None = None
        """Those of the last step, in the order of its batch, side by side; None without taps."""
        self.groups = size_groups(decoder.windows, spec)
        self._kv = [
            PagedKV(self._new_pool(group.num_pages + self.SPARE_PAGES, layout), layout)
            for group, layout in zip(self.groups, decoder.page_layouts(spec.page_size), strict=True)
        ]
        self.host = self._make_host(spec)
        self.cost_per_key = self._measured_cost_per_key()

    def run(self, batch: Batch) -> Logits:
        batch = side_by_side(batch)
        taps: dict[int, Tensor | None] = dict.fromkeys(self.taps)
        token_ids_N, positions_N, table_of_N, tables_GSP, out_rows_M = (
            torch.from_numpy(array).to(self.decoder.device) for array in batch[:5]
        )
        logits_MV = self.decoder.forward(
            token_ids_N, positions_N, table_of_N, tables_GSP, self._kv, out_rows_M, taps=taps,
            twins=twins_of(batch, self.decoder.device),
        )  # fmt: skip
        self.features_NF = features_of(taps, batch) if taps else None
        return self.handed_out(logits_MV)

    def handed_out(self, logits_MV: Tensor) -> Logits:
        """Logits where the sampler wants them: here in memory."""
        logits: NDArray[np.float32] = logits_MV.cpu().numpy()
        return logits

    def run_draft(self, model: DraftModel, kv: Sequence[PagedKV], batch: Batch, features_ND: Tensor) -> Step:
        """A pass of a draft model over rows in pages of its own."""
        token_ids_N, positions_N, table_of_N, tables_GSP, out_rows_M = map(torch.from_numpy, batch[:5])
        return model.forward(token_ids_N, positions_N, table_of_N, tables_GSP, kv, out_rows_M, features_ND)

    def _new_pool(self, pages: int, layout: PageLayout) -> Tensor:
        size, dtype = pages * layout.page_stride, self.decoder.kv_dtype
        if self.decoder.device.type == "cpu":  # numpy asks for large memory pages, torch does not
            return torch.from_numpy(np.zeros(size * dtype.itemsize, dtype=np.uint8)).view(dtype)
        return torch.zeros(size, dtype=dtype, device=self.decoder.device)

    def copy_page(self, copy: PageCopy) -> None:
        pool, layout = self._kv[copy.group]
        pages_PE = pool.view(-1, layout.page_stride)
        pages_PE[copy.target] = pages_PE[copy.source]

    def stage(self, source: WeightSource) -> Install:
        """See `engine.step.Runner.stage`: a second decoder is made of the new weights, and takes the place of the first."""
        return staged(source, self.decoder.shapes, self._stage)

    def _stage(self, weights: Mapping[str, Tensor]) -> Install:
        decoder = self.decoder
        # Copies, also of what is of the right kind already: the trainer goes on changing its own.
        own = {
            name: tensor.to(decoder.device, held_type(name, decoder.dtype), copy=True)
            for name, tensor in weights.items()
        }
        return partial(self._use, decoder.with_weights(own))

    def _use(self, decoder: CausalModel) -> None:
        self.decoder = decoder

    def _make_host(self, spec: EngineSpec) -> Host:
        """The host's memory for these pages, and who copies them; none beside a device that we have no mover for."""
        device = [pool.view(-1, layout.page_stride).view(torch.uint8) for pool, layout in self._kv]
        page_bytes = [pages_PB.shape[1] for pages_PB in device]
        counts = size_host(page_bytes, spec)
        host = [torch.empty(shape, dtype=torch.uint8) for shape in zip(counts, page_bytes, strict=True)]
        mover = self._make_mover(device, host)
        return Host(counts, page_bytes, ThreadCopier(mover, checks=spec.debug)) if mover else no_host(len(device))

    def _make_mover(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> Mover | None:
        """Between pages that are rows of bytes."""
        if self.decoder.device.type != "cpu":
            return None
        return HostMover([pages_PB.numpy() for pages_PB in device], [pages_PB.numpy() for pages_PB in host])

    def _measured_cost_per_key(self) -> float:
        """Time rows that attend few keys and rows that attend many; what a key adds, in rows. Compiles, on the way."""
        keys = min(PROBE_KEYS, self.decoder.context_length, self.groups[0].num_pages * self.page_size)
        rows = min(PROBE_ROWS, keys)
        few, many = self._probe(0, rows), self._probe(keys - rows, rows)
        seconds: dict[int, list[float]] = {0: [], 1: []}
        for attempt in range(PROBE_RUNS + 1):
            for which, batch in enumerate((few, many)):
                started = time.perf_counter()
                torch.as_tensor(self.run(batch)).cpu()  # waits for a device
                if attempt:  # the first one compiles
                    seconds[which].append(time.perf_counter() - started)
        ratio = min(seconds[1]) / min(seconds[0])
        return max(ratio - 1, 0.0) / (keys - rows) if keys > rows else 0.0

    def _probe(self, start: int, rows: int) -> Batch:
        """A prompt chunk at positions from `start` on, in pages that hold nothing yet."""
        places = np.arange(-(-(start + rows) // self.page_size), dtype=np.int32)
        tables_GSP = np.stack([places[None] % group.num_pages for group in self.groups], dtype=np.int32)
        return Batch(
            np.zeros(rows, dtype=np.int64), np.arange(start, start + rows, dtype=np.int64), np.zeros(rows, dtype=np.int32),
            tables_GSP, np.array([rows - 1], dtype=np.int64), [],
        )  # fmt: skip


def side_by_side(batch: Batch) -> Batch:
    """The same rows, those of tables that share pages next to one another, in whatever tree they share them.

    The order of rows changes no bit; attention reads a page once for neighbours that share it.
    """
    names_S = [table_P.tobytes() for table_P in batch.tables_GSP[0]]
    rank_S = np.empty(len(names_S), dtype=np.int64)
    rank_S[sorted(range(len(names_S)), key=names_S.__getitem__)] = np.arange(len(names_S))
    order_N = np.argsort(rank_S[batch.table_of_N], kind="stable")
    place_N = np.empty_like(order_N)
    place_N[order_N] = np.arange(len(order_N))
    return batch._replace(
        token_ids_N=batch.token_ids_N[order_N], positions_N=batch.positions_N[order_N],
        table_of_N=batch.table_of_N[order_N], out_rows_M=place_N[batch.out_rows_M],
        twin_rows_W=place_N[batch.twin_rows_W],
    )  # fmt: skip


def twins_of(batch: Batch, device: torch.device) -> Twins | None:
    """Those of a batch, on the device."""
    if not len(batch.twin_rows_W):
        return None
    rows_W, tables_W = (torch.from_numpy(array).to(device, non_blocking=True) for array in batch[6:])
    return Twins(rows_W, tables_W)


def features_of(taps: Mapping[int, Tensor | None], batch: Batch) -> Tensor:
    """Hidden states one beside the other, table by table again: `side_by_side` moves the rows of a table together.

    Always a copy. Rows beyond those of the batch, which a padded step has, are left out.
    """
    taken_NF = torch.cat([hidden_ND for hidden_ND in taps.values() if hidden_ND is not None], dim=1)
    order_N = torch.from_numpy(np.argsort(batch.table_of_N, kind="stable"))
    return taken_NF[order_N.to(taken_NF.device, non_blocking=True)]
