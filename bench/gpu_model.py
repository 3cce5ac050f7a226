"""The device, random models of a real model's shape and steps of them, for bench/gpu_check.py."""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from agentrt.core.spec import EngineSpec
from agentrt.engine.batch import Batch
from agentrt.engine.cuda_runner import CudaRunner
from agentrt.engine.model.config import ModelConfig, load_config
from agentrt.engine.model.decoder import Decoder, expected_shapes
from agentrt.engine.runner import ModelRunner
from agentrt_kernels.interpreted import repair
from agentrt_kernels.sample.launch import sample
from agentrt_kernels.sample.rules import Rule, Rules

DRY = os.environ.get("TRITON_INTERPRET") == "1"
"""On the CPU at toy sizes: no figure means anything then. Kernels of tests, logits and sampling are interpreted."""
if DRY:
    repair()
DEVICE = torch.device("cpu" if DRY else "cuda")
DTYPE = torch.float32 if DRY else torch.bfloat16

SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
TOY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
}  # fmt: skip
FAMILY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip


class Line(NamedTuple):
    """One line of the table."""

    what: str
    figure: str
    bar: str = ""


class Peaks(NamedTuple):
    """What this machine does at best, measured before all else."""

    copy: float
    """Bytes a second read and written by a copy on the device."""
    matmul: float
    """Operations a second of a large product."""
    to_host: float
    to_device: float


def model_config(name: str, toy: bool) -> ModelConfig:
    """Qwen3 of that size; its widths are a toy's in a dry run."""
    sizes = FAMILY | SHAPES[name] | {"tie_word_embeddings": name == "0.6B"} | (TOY if toy else {})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(sizes))
        return load_config(Path(folder))


def random_decoder(config: ModelConfig) -> Decoder:
    """Weights of a size at which activations stay finite."""
    weights = {
        name: torch.randn(shape, device=DEVICE, dtype=DTYPE) * (0.02 if len(shape) > 1 else 1.0)
        for name, shape in expected_shapes(config).items()
    }
    return Decoder(config, weights, "reference" if DRY else "launch")


def new_runner(decoder: Decoder, kv_tokens: int, max_batch: int, host_bytes: int) -> ModelRunner:
    """The runner of the device, with so many bytes of pages on the host."""
    spec = EngineSpec(
        device=str(decoder.device), kv_tokens=kv_tokens, max_batch=max_batch, step_tokens=max(8192, max_batch)
    )
    token_bytes = (
        sum(layout.page_stride for layout in decoder.page_layouts(spec.page_size)) * DTYPE.itemsize // spec.page_size
    )
    spec = msgspec.structs.replace(spec, host_tokens=max(host_bytes // token_bytes, spec.page_size))
    return device_runner(decoder, spec)


def device_runner(decoder: Decoder, spec: EngineSpec) -> ModelRunner:
    """The runner of the decoder's device."""
    return CudaRunner(decoder, spec) if decoder.device.type == "cuda" else ModelRunner(decoder, spec)


def step_of(sequences: int, start: int, rows: int, page_size: int, only_last: bool) -> Batch:
    """`rows` ids of each sequence from position `start` on, in pages of their own; the logits of all rows or the last."""
    places = -(-(start + rows) // page_size)
    tables_GSP = np.arange(sequences * places, dtype=np.int32).reshape(1, sequences, places)
    positions_N = np.tile(np.arange(start, start + rows, dtype=np.int64), sequences)
    out_rows_M = np.arange(sequences * rows, dtype=np.int64)
    ids_N = np.random.default_rng(0).integers(0, 64, sequences * rows)
    table_of_N = np.repeat(np.arange(sequences, dtype=np.int32), rows)
    return Batch(
        ids_N, positions_N, table_of_N, tables_GSP, out_rows_M[rows - 1 :: rows] if only_last else out_rows_M, []
    )


def run_and_sample(runner: ModelRunner, batch: Batch) -> None:
    """A step as the engine has it: forward, and an id for each row that is read, on the host."""
    logits_MV = torch.as_tensor(runner.run(batch))
    rows = len(logits_MV)
    seeds_M, positions_M = np.arange(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int64)
    sample(logits_MV, logits_MV.shape[1], Rules.of([Rule()] * rows), seeds_M, positions_M)


def seconds(action: Callable[[], object], runs: int = 10, warm: int = 2) -> float:
    """The median time of an action and all that it started on the device."""
    times = []
    for run in range(warm + runs):
        _synchronise()
        started = time.perf_counter()
        action()
        _synchronise()
        if run >= warm:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _synchronise() -> None:
    if not DRY:
        torch.cuda.synchronize()
