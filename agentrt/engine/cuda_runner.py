"""A runner on a GPU: decodes, and passes of a draft model, replay CUDA graphs, and nothing in a step waits for the device.

A graph has fixed shapes, so a step is padded to the next captured one: rows of id 0 that write to a spare page and attend
nothing. A shape is captured when it is first met. A step whose sequences have a few rows each, all of them read (decodes,
and drafts that are verified), is such a step. One with prompt chunks runs operation by operation: there a launch is
short beside the work. Logits stay on the device; the sampler reads what it draws.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt.core.errors import UsageError
from agentrt.core.protocol import WeightSource
from agentrt.core.spec import EngineSpec
from agentrt.engine.batch import Batch
from agentrt.engine.kv.copier import Mover
from agentrt.engine.kv.cuda_mover import CudaMover
from agentrt.engine.model.causal import CausalModel
from agentrt.engine.model.decoder import Decoder, PagedKV, Twins
from agentrt.engine.model.tensors import overwrite
from agentrt.engine.runner import ModelRunner, features_of, side_by_side, twins_of
from agentrt.engine.speculate.drafter import DraftModel
from agentrt.engine.speculate.head import Step
from agentrt.engine.weights import Install
from agentrt_kernels.paged_attention.flashinfer import FlashInfer, FlashPlan
from agentrt_kernels.paged_attention.launch import DevicePlan, lanes_of, tile_rows, to_device
from agentrt_kernels.paged_attention.plan import DECODE_KEYS, Plan, plan_attention

DRAFTS = 16
"""Rows of one sequence up to which a step counts as decodes."""

Ints = NDArray[np.int64] | NDArray[np.int32]
Taps = dict[int, Tensor | None]
"""By number of layers, the hidden states after so many."""
Result = TypeVar("Result")


class Shape(NamedTuple):
    """What a graph is captured for; every number but `lanes` is a power of two (or 0)."""

    rows: int
    sequences: int
    """Page tables: those of branches too."""
    places: int
    items: int
    parts: int
    slots: int
    lanes: int
    twins: int = 0
    taps: tuple[int, ...] = ()
    """After which numbers of layers hidden states are kept."""


class Inputs(NamedTuple):
    """What a step of decodes gives a graph: its batch and its plan, padded."""

    token_ids_N: Ints
    positions_N: Ints
    table_of_N: Ints
    tables_GSP: Ints
    out_rows_M: Ints
    items_I5: Ints
    slots_NC: Ints
    twin_rows_W: Ints
    twin_tables_W: Ints


class CudaRunner(ModelRunner):
    """`engine.step.Runner` with the kernels of `agentrt_kernels/*/launch.py`."""

    SPARE_PAGES = 1

    def __init__(self, decoder: CausalModel, spec: EngineSpec) -> None:
        """`UsageError` if the page size does not fit the kernels, or FlashInfer is asked for and cannot serve.

        Whether the pages fit is for the caller to see.
        """
        if DECODE_KEYS % spec.page_size:
            raise UsageError(
                f"engine.page_size must divide {DECODE_KEYS} on a GPU, but it is {spec.page_size}; take 16"
            )
        self._flash = _flash(decoder, spec) if spec.attention == "flashinfer" else None
        self._graphs: dict[Shape, _Graph[tuple[Tensor, Taps]]] = {}
        self._draft_graphs: dict[Shape, tuple[_Graph[Step], Tensor]] = {}
        """With the memory that each reads hidden states from."""
        self._memory = torch.cuda.graph_pool_handle()  # one for all graphs, as one runs at a time
        self._staging = torch.cuda.Stream(decoder.device)  # type: ignore[no-untyped-call]
        super().__init__(decoder, spec)

    def run(self, batch: Batch) -> Tensor:
        """`logits_MV` on the device; the next step overwrites them, but not `features_NF`."""
        batch = side_by_side(batch)
        plan = plan_attention(*batch[1:3], batch.tables_GSP[0], self.page_size, tile_rows(self.decoder.query_group))
        logits_MV, taps = self._replay(batch, plan) if self._replays(batch) else self._forward(batch, plan)
        self.features_NF = features_of(taps, batch) if taps else None
        return logits_MV

    def handed_out(self, logits_MV: Tensor) -> Tensor:
        """Where they are: the sampler reads what it draws."""
        return logits_MV

    def run_draft(self, model: DraftModel, kv: Sequence[PagedKV], batch: Batch, features_ND: Tensor) -> Step:
        """As on the CPU; a pass of few rows a sequence replays a graph, in which all rows are read."""
        group, device = model.query_group, self.decoder.device
        plan = plan_attention(*batch[1:3], batch.tables_GSP[0], self.page_size, tile_rows(group))
        if not has_few_rows(batch):
            ids_N, positions_N, table_of_N, tables_GSP, rows_M = (
                torch.from_numpy(array).to(device, non_blocking=True) for array in batch[:5]
            )
            device_plan = to_device(plan, group, device)
            return model.forward(ids_N, positions_N, table_of_N, tables_GSP, kv, rows_M, features_ND, device_plan)
        whole = batch._replace(out_rows_M=np.arange(len(batch.positions_N)))
        shape = shape_of(whole, plan, group)
        inputs = pad(whole, plan, shape, [len(pool) // layout.page_stride - 1 for pool, layout in kv])
        if shape not in self._draft_graphs:
            features_RD = features_ND.new_zeros(shape.rows if model.taps else 0, *features_ND.shape[1:])
            run = partial(_draft_pass, model, kv, shape, features_RD)
            self._draft_graphs[shape] = _Graph(run, inputs, device, self._memory), features_RD
        graph, features_RD = self._draft_graphs[shape]
        features_RD[: len(features_ND)].copy_(features_ND)
        logits_RV, after_RD = graph.replay(inputs)
        rows_M = torch.from_numpy(batch.out_rows_M).to(device, non_blocking=True)
        return Step(logits_RV[rows_M], None if after_RD is None else after_RD[rows_M])

    def stage(self, source: WeightSource) -> Install:
        self._staging.wait_stream(torch.cuda.current_stream())  # a trainer in this process may still write them
        with torch.cuda.stream(self._staging):  # beside the steps, whose stream waits neither for a copy nor for NCCL
            install = super().stage(source)
            self._staging.synchronize()
        return install

    def _use(self, decoder: CausalModel) -> None:
        """In place: graphs read the memory of the weights that they were captured with."""
        overwrite(self.decoder, decoder)
        torch.cuda.current_stream().synchronize()  # what was staged is given back then

    def _make_mover(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> Mover:
        return CudaMover(device, host)

    def _replays(self, batch: Batch) -> bool:
        return self.decoder.is_capturable and is_graphed(batch)

    def _forward(self, batch: Batch, plan: Plan) -> tuple[Tensor, Taps]:
        device, taps = self.decoder.device, dict[int, Tensor | None].fromkeys(self.taps)
        ids_N, positions_N, table_of_N, tables_GSP, rows_M = (
            torch.from_numpy(array).to(device, non_blocking=True) for array in batch[:5]
        )
        device_plan = to_device(plan, self.decoder.query_group, device) if self._flash is None else self._flashed(batch)
        logits_MV = self.decoder.forward(
            ids_N, positions_N, table_of_N, tables_GSP, self._kv, rows_M, device_plan, taps=taps,
            twins=twins_of(batch, device),
        )  # fmt: skip
        return logits_MV, taps

    def _flashed(self, batch: Batch) -> FlashPlan:
        decoder, layouts = self.decoder, [layout for _, layout in self._kv]
        assert self._flash is not None
        return self._flash.plan(*batch[1:4], decoder.windows, layouts, decoder.query_group, decoder.dtype)

    def _replay(self, batch: Batch, plan: Plan) -> tuple[Tensor, Taps]:
        shape = shape_of(batch, plan, self.decoder.query_group)._replace(taps=self.taps)
        inputs = pad(batch, plan, shape, [group.num_pages for group in self.groups])
        if shape not in self._graphs:
            run = partial(_step, self.decoder, self._kv, shape)
            self._graphs[shape] = _Graph(run, inputs, self.decoder.device, self._memory)
        logits_MV, taps = self._graphs[shape].replay(inputs)
        return logits_MV[: len(batch.out_rows_M)], taps


def _step(decoder: CausalModel, kv: Sequence[PagedKV], shape: Shape, inputs: Sequence[Tensor]) -> tuple[Tensor, Taps]:
    """What a graph of a step computes: logits and hidden states of all rows."""
    ids_N, positions_N, table_of_N, tables_GSP, rows_M, items_I5, slots_NC, *twins = inputs
    plan, taps = DevicePlan(items_I5, slots_NC, shape.slots, shape.lanes), Taps.fromkeys(shape.taps)
    logits_MV = decoder.forward(
        ids_N, positions_N, table_of_N, tables_GSP, kv, rows_M, plan, taps=taps,
        twins=Twins(*twins) if shape.twins else None,
    )  # fmt: skip
    return logits_MV, taps


def _draft_pass(
    model: DraftModel, kv: Sequence[PagedKV], shape: Shape, features_RD: Tensor, inputs: Sequence[Tensor]
) -> Step:
    """What a graph of a draft model computes: all rows."""
    ids_N, positions_N, table_of_N, tables_GSP, rows_M, items_I5, slots_NC, *_ = inputs
    plan = DevicePlan(items_I5, slots_NC, shape.slots, shape.lanes)
    return model.forward(ids_N, positions_N, table_of_N, tables_GSP, kv, rows_M, features_RD, plan)


class _Graph(Generic[Result]):
    """A captured pass and the memory that it reads and writes."""

    def __init__(
        self, run: Callable[[Sequence[Tensor]], Result], inputs: Inputs, device: torch.device, memory: Any
    ) -> None:
        self._host = [torch.from_numpy(array).pin_memory() for array in inputs]
        self._device = [tensor.to(device) for tensor in self._host]
        run(self._device)  # compiles, which a capture cannot
        self._graph = torch.cuda.CUDAGraph()
        # The threads that copy pages and stage weights use the device meanwhile; only this one may not.
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._result = run(self._device)

    def replay(self, inputs: Inputs) -> Result:
        """What the pass gives for all rows, those that were added last; it is overwritten by the next replay.

        The pinned copies are free to be written: whoever read the logits of the pass before waited for it.
        """
        for host, device, array in zip(self._host, self._device, inputs, strict=True):
            host.copy_(torch.from_numpy(array))
            device.copy_(host, non_blocking=True)
        self._graph.replay()
        return self._result


def _flash(decoder: CausalModel, spec: EngineSpec) -> FlashInfer:
    if not isinstance(decoder, Decoder) or decoder.page_layouts(spec.page_size)[0].parts == 1:
        raise UsageError("engine.attention=flashinfer is for models of our own decoder without latents; take auto")
    try:
        return FlashInfer(decoder.device)
    except ImportError as error:
        raise UsageError(
            f"engine.attention=flashinfer needs FlashInfer ({error}): pip install 'agentrt[flashinfer]', or take auto"
        ) from error


def is_graphed(batch: Batch) -> bool:
    """Whether all rows are read and no sequence has many."""
    return len(batch.out_rows_M) == len(batch.positions_N) and has_few_rows(batch)


def has_few_rows(batch: Batch) -> bool:
    """Whether no table has many rows."""
    return int(np.bincount(batch.table_of_N).max()) <= DRAFTS


def shape_of(batch: Batch, plan: Plan, lanes_a_row: int) -> Shape:
    """The least shape that holds a step of decodes, with a table for rows that are added."""
    _, sequences, places = batch.tables_GSP.shape
    rows = _power_of_two(len(batch.positions_N))
    twins = _power_of_two(len(batch.twin_rows_W)) if len(batch.twin_rows_W) else 0
    is_padded = rows > len(batch.positions_N) or twins > len(batch.twin_rows_W)
    sequences = _power_of_two(sequences + is_padded)
    places, items, parts = map(_power_of_two, (places, len(plan.items_I5), plan.slots_NC.shape[1]))
    slots = _power_of_two(plan.num_slots) if plan.num_slots else 0
    return Shape(rows, sequences, places, items, parts, slots, lanes_of(plan, lanes_a_row), twins)


def pad(batch: Batch, plan: Plan, shape: Shape, spare_pages: Sequence[int]) -> Inputs:
    """The arrays of a step of decodes in a graph's shape. Rows that were added are at position 0 of the spare pages.

    Twins that were added write the first row there, wherever it is.
    """
    tables_GSP = np.empty((len(spare_pages), shape.sequences, shape.places), dtype=np.int32)
    tables_GSP[:] = np.array(spare_pages, dtype=np.int32)[:, None, None]
    _, sequences, places = batch.tables_GSP.shape
    tables_GSP[:, :sequences, :places] = batch.tables_GSP
    return Inputs(
        _padded(batch.token_ids_N, (shape.rows,), 0),
        _padded(batch.positions_N, (shape.rows,), 0),
        _padded(batch.table_of_N, (shape.rows,), shape.sequences - 1),
        tables_GSP,
        _padded(batch.out_rows_M, (shape.rows,), 0),
        _padded(plan.items_I5, (shape.items, 5), 0),  # an item of no rows is left at once
        _padded(plan.slots_NC, (shape.rows, shape.parts), -1),
        _padded(batch.twin_rows_W, (shape.twins,), 0),
        _padded(batch.twin_tables_W, (shape.twins,), shape.sequences - 1),
    )


def _padded(array: Ints, shape: tuple[int, ...], fill: int) -> Ints:
    padded = np.full(shape, fill, dtype=array.dtype)
    padded[tuple(slice(size) for size in array.shape)] = array
    return padded


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
