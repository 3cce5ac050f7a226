"""What a model's steps take on a GPU, as fractions of what the machine does at best, for bench/gpu_check.py."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from gpu_model import (
    DEVICE,
    DRY,
    DTYPE,
    Line,
    Peaks,
    device_runner,
    model_config,
    new_runner,
    random_decoder,
    run_and_sample,
    seconds,
    step_of,
)

from agentrt.core.spec import EngineSpec
from agentrt.engine.batch import Batch
from agentrt.engine.kv.pages import PageCopies
from agentrt.engine.kv.tiers import Direction
from agentrt.engine.local import sized
from agentrt.engine.model.decoder import Decoder, expected_shapes
from agentrt.engine.model.rope import Rope
from agentrt.engine.runner import ModelRunner
from agentrt.engine.speculate.drafter import Drafter
from agentrt.engine.speculate.head import DraftHead
from agentrt.engine.speculate.head_config import HeadConfig

BATCHES = (1, 2) if DRY else (1, 32, 256)
CONTEXT = 40 if DRY else 1024
PREFILL_ROWS = 16 if DRY else 8192
DRAFTS = 4
PAGE = 16
SWAPPED_BYTES = 1 << (16 if DRY else 30)
SAVE: Final = "save"
LOAD: Final = "load"


class Model(NamedTuple):
    """A random model and its runner."""

    name: str
    decoder: Decoder
    runner: ModelRunner
    peaks: Peaks


def steps(name: str, peaks: Peaks) -> Iterator[Line]:
    """Decode, prefill, verification, drafts, swap and weight updates of a random model."""
    decoder = random_decoder(model_config(name, toy=DRY))
    model = Model(
        name, decoder, new_runner(decoder, max(BATCHES) * (CONTEXT + PAGE), max(BATCHES), SWAPPED_BYTES), peaks
    )
    for batch in BATCHES:
        yield _decode(model, batch)
        yield _prefill(model, batch)
    decode = step_of(BATCHES[1], CONTEXT - 1, 1, PAGE, only_last=True)
    step = _step_seconds(model, decode)
    verify = step_of(BATCHES[1], CONTEXT - 1 - DRAFTS, 1 + DRAFTS, PAGE, only_last=False)
    slower = _step_seconds(model, verify) / step
    yield Line(f"{name}: {DRAFTS} drafts verified, batch {BATCHES[1]}", f"{slower:.2f} decode steps")
    yield from _drafts(model, decode, step)
    yield from _swaps(model, decode)
    yield from _updates(model, decode, step)


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


def _drafts(model: Model, decode: Batch, step: float) -> Iterator[Line]:
    """What an EAGLE-3 head costs: hidden states of three layers handed out, and its own pass an id."""
    config, decoder, layers = model.decoder.config, model.decoder, model.decoder.config.num_layers
    head_config = HeadConfig(
        kind="eagle3", hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        context_length=config.context_length, norm_eps=config.norm_eps, rope=config.ropes[0] or Rope(1e6),
        vocab_size=config.vocab_size, draft_vocab_size=config.vocab_size, taps=tuple(sorted({1, -(-layers // 2), layers})),
        target="",
    )  # fmt: skip
    weights = {
        name: torch.randn(shape, device=DEVICE, dtype=DTYPE) * 0.02 for name, shape in head_config.shapes().items()
    }
    spec = EngineSpec(device=str(DEVICE), kv_tokens=PAGE * 64, speculate="auto")
    drafter = Drafter(DraftHead(head_config, weights, decoder), model.runner, spec, decoder.vocab_size)
    model.runner.taps = head_config.taps
    slower = _step_seconds(model, decode) / step
    model.runner.taps = ()
    yield Line(f"{model.name}: decode, batch {BATCHES[1]}, hidden states handed out", f"{slower:.2f} decode steps")
    passes = ", ".join(f"{taken * 1e3:.2f}" for taken in drafter.measure().values())
    yield Line(f"{model.name}: an id of an EAGLE-3 head, for 1 and for 8", f"{passes} ms")


def _swaps(model: Model, decode: Batch) -> Iterator[Line]:
    """Pages through the engine's own copier, alone and beside decode steps."""
    host, pool_pages = model.runner.host, model.runner.groups[0].num_pages
    count = min(host.pages[0], pool_pages)
    pages = list(range(count))
    copies = [PageCopies(0, pages, pages[::-1])]  # backwards: no two of them are one copy
    back = [PageCopies(0, pages[::-1], pages)]
    size, runs = count * host.page_bytes[0], 1 if DRY else 5
    for where, direction, jobs, best in (
        ("out", SAVE, copies, model.peaks.to_host), ("in", LOAD, back, model.peaks.to_device),
    ):  # fmt: skip
        rate = size / seconds(partial(_copied, model, direction, jobs), runs=runs, warm=1)
        figure = f"{rate / 1e9:.1f} GB/s, {rate / best:.0%} of a pinned copy"
        yield Line(f"{model.name}: swap {where}, {host.page_bytes[0] >> 10} KiB a page", figure, "70 %")
    alone, beside = [], []
    for _ in range(runs):
        alone.append(_step_seconds(model, decode))
        events = [host.copier.start(direction, jobs) for direction, jobs in ((SAVE, copies), (LOAD, back)) * 4]
        while not all(event.is_done for event in events):
            started = time.perf_counter()
            run_and_sample(model.runner, decode)
            beside.append(time.perf_counter() - started)
    slower = np.median(beside) / np.median(alone) - 1
    yield Line(f"{model.name}: decode while swapping both ways", f"{slower:+.1%}, {len(beside)} steps", "3 %")


def _copied(model: Model, direction: Direction, copies: list[PageCopies]) -> None:
    assert model.runner.host.copier.start(direction, copies).wait(60)


def _updates(model: Model, decode: Batch, step: float) -> Iterator[Line]:
    """New weights by the engine's own way, and the step after them, whose graph was captured before.

    Last into an engine that has taken what was free.
    """
    shapes = expected_shapes(model.decoder.config)
    weights = {name: torch.zeros(shape, dtype=DTYPE, device=DEVICE) for name, shape in shapes.items()}
    pauses, firsts = [], []
    for _ in range(2 if DRY else 5):
        install = model.runner.stage(weights)
        started = time.perf_counter()
        install()
        pauses.append(time.perf_counter() - started)
        started = time.perf_counter()
        run_and_sample(model.runner, decode)
        firsts.append(time.perf_counter() - started)
    bound = step + 2 * model.decoder.num_parameters * DTYPE.itemsize / model.peaks.copy
    yield Line(f"{model.name}: pause of an update", f"{np.median(pauses) * 1e3:.1f} ms", f"{bound * 1e3:.1f} ms")
    yield Line(f"{model.name}: first step after an update", f"{np.median(firsts) / step:.2f} decode steps")
    spec = sized(EngineSpec(device=str(DEVICE), host_tokens=0), model.decoder, None)
    device_runner(model.decoder, spec).stage(weights)()
    yield Line(f"{model.name}: engine.kv_tokens=auto, beside all this", f"{spec.pool_tokens:,} ids, and an update fits")
