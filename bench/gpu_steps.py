"""What a model's steps take on a GPU, as fractions of what the machine does at best, for bench/gpu_check.py."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from gpu_model import (
    DEVICE,
    DRY,
    DTYPE,
    Line,
    Peaks,
    model_config,
    new_runner,
    random_decoder,
    run_and_sample,
    seconds,
    step_of,
)
from torch import Tensor

from agentrt.engine.batch import Batch
from agentrt.engine.model.decoder import Decoder, expected_shapes
from agentrt.engine.runner import ModelRunner

BATCHES = (1, 2) if DRY else (1, 32, 256)
CONTEXT = 40 if DRY else 1024
PREFILL_ROWS = 16 if DRY else 8192
DRAFTS = 4
PAGE = 16
SWAPPED_BYTES = 1 << (12 if DRY else 30)


class Model(NamedTuple):
    """A random model and its runner."""

    name: str
    decoder: Decoder
    runner: ModelRunner
    peaks: Peaks


def steps(name: str, peaks: Peaks) -> Iterator[Line]:
    """Decode, prefill, verification, swap and weight updates of a random model."""
    decoder = random_decoder(model_config(name, toy=DRY))
    model = Model(name, decoder, new_runner(decoder, max(BATCHES) * (CONTEXT + PAGE), max(BATCHES)), peaks)
    for batch in BATCHES:
        yield _decode(model, batch)
        yield _prefill(model, batch)
    decode = step_of(BATCHES[1], CONTEXT - 1, 1, PAGE, only_last=True)
    step = _step_seconds(model, decode)
    verify = step_of(BATCHES[1], CONTEXT - 1 - DRAFTS, 1 + DRAFTS, PAGE, only_last=False)
    slower = _step_seconds(model, verify) / step
    yield Line(f"{name}: {DRAFTS} drafts verified, batch {BATCHES[1]}", f"{slower:.2f} decode steps")
    yield from _swaps(model, decode)
    yield _update(model, step)


def _step_seconds(model: Model, batch: Batch) -> float:
    return seconds(lambda: run_and_sample(model.runner, batch), runs=2 if DRY else 20)


def _decode(model: Model, batch: int) -> Line:
    """Bytes that must be read: every weight of a product once, the keys and values of every sequence."""
    config, decoder = model.decoder.config, model.decoder
    taken = _step_seconds(model, step_of(batch, CONTEXT - 1, 1, PAGE, only_last=True))
    looked_up = 0 if config.tied_embeddings else decoder.embedding_VD.numel()
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * batch * CONTEXT
    fraction = (decoder.num_parameters - looked_up + kv) * DTYPE.itemsize / taken / model.peaks.copy
    figure = f"{taken * 1e3:.2f} ms, {fraction:.0%} of copy bandwidth"
    return Line(f"{model.name}: decode, batch {batch}, context {CONTEXT}", figure, "70 %" if batch == 32 else "")


def _prefill(model: Model, batch: int) -> Line:
    """Operations of the layers' products and of attention, half of which is masked."""
    config, decoder = model.decoder.config, model.decoder
    rows = PREFILL_ROWS // batch
    step = step_of(batch, 0, rows, PAGE, only_last=True)
    taken = seconds(lambda: model.runner.run(step), runs=2 if DRY else 5)
    layers = decoder.num_parameters - decoder.embedding_VD.numel() * (1 if config.tied_embeddings else 2)
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * batch * rows * rows
    fraction = (2 * layers * PREFILL_ROWS + attention) / taken / model.peaks.matmul
    figure = f"{taken * 1e3:.1f} ms, {fraction:.0%} of the matmul rate"
    return Line(f"{model.name}: prefill, {batch} of {rows}", figure, "55 %")


def _swaps(model: Model, decode: Batch) -> Iterator[Line]:
    """Pages by one copy each, on streams of their own, alone and beside decode steps."""
    pool, layout = model.runner._kv[0]
    pages_PE = pool.view(-1, layout.page_stride)
    page_bytes = layout.page_stride * pool.element_size()
    count = min(len(pages_PE), max(SWAPPED_BYTES // page_bytes, 1))
    host_PE = torch.empty(count, layout.page_stride, dtype=pool.dtype, pin_memory=not DRY)
    runs = 1 if DRY else 5
    rate = count * page_bytes / seconds(lambda: _copy(host_PE, pages_PE), runs=runs, warm=1)
    yield _swap_line(model.name, "out", rate, model.peaks.to_host)
    rate = count * page_bytes / seconds(lambda: _copy(pages_PE, host_PE), runs=runs, warm=1)
    yield _swap_line(model.name, "in", rate, model.peaks.to_device)
    ratios = []
    for _ in range(runs):
        alone = seconds(lambda: run_and_sample(model.runner, decode), runs=runs, warm=0)
        _copy(host_PE, pages_PE)
        started = time.perf_counter()
        for _ in range(runs):
            run_and_sample(model.runner, decode)
        ratios.append((time.perf_counter() - started) / runs / alone)
    yield Line(f"{model.name}: decode while swapping out", f"{np.median(ratios) - 1:+.1%}", "3 %")


def _swap_line(name: str, where: str, rate: float, best: float) -> Line:
    return Line(f"{name}: swap {where}", f"{rate / 1e9:.1f} GB/s, {rate / best:.0%} of a pinned copy", "70 %")


def _copy(targets_PE: Tensor, sources_PE: Tensor) -> None:
    stream: AbstractContextManager[object] = nullcontext() if DRY else torch.cuda.stream(torch.cuda.Stream())
    with stream:
        for target_E, source_E in zip(targets_PE, sources_PE, strict=False):  # as many as the shorter one has
            target_E.copy_(source_E, non_blocking=True)


def _update(model: Model, step: float) -> Line:
    """As many weights as the model has copied in place, as an update between two steps has to."""
    shapes = expected_shapes(model.decoder.config).values()
    held, new = ([torch.zeros(shape, dtype=DTYPE, device=DEVICE) for shape in shapes] for _ in range(2))
    taken = seconds(lambda: [there.copy_(weight) for there, weight in zip(held, new, strict=True)], runs=2)
    bound = step + 2 * model.decoder.num_parameters * DTYPE.itemsize / model.peaks.copy
    return Line(f"{model.name}: weights copied in place", f"{taken * 1e3:.1f} ms", f"{bound * 1e3:.1f} ms")
