"""What a machine can do at best, measured: reads from memory and float32 products; and what a step must read and multiply."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from agentrt.engine.model.config import ModelConfig

READ_BYTES, PRODUCT_SIZE, RUNS = 1 << 29, 1536, 5


class Machine(NamedTuple):
    bytes_per_second: float
    flops_per_second: float


class Work(NamedTuple):
    """Of one step."""

    bytes_read: float
    flops: float

    def fraction(self, machine: Machine, seconds: float) -> float:
        """The share of `seconds` that the machine would need at least: of reading or of multiplying, whichever is longer."""
        return max(self.bytes_read / machine.bytes_per_second, self.flops / machine.flops_per_second) / seconds


def measure_machine() -> Machine:
    """The best of a few runs each, on torch's threads."""
    values, square = torch.ones(READ_BYTES // 4), torch.randn(PRODUCT_SIZE, PRODUCT_SIZE)
    return Machine(READ_BYTES / _best(values.sum), 2 * PRODUCT_SIZE**3 / _best(lambda: square @ square))


def decode_work(
    config: ModelConfig, weight_bytes: int, kv_bytes: int, batch: int, context: int, unique_context: float
) -> Work:  # fmt: skip
    """One decode step, with so many bytes for a weight and for a number of KV.

    Of each sequence's `context` keys, `unique_context` are read from memory for it alone.
    """
    heads, size, layers, hidden = config.num_heads, config.head_dim, config.num_layers, config.hidden_size
    per_layer = hidden * size * (2 * heads + 2 * config.num_kv_heads) + 3 * hidden * config.intermediate_size
    weights = layers * per_layer + config.vocab_size * hidden
    key_bytes = 2 * config.num_kv_heads * size * layers * kv_bytes
    flops = batch * (2 * weights + 4 * heads * size * layers * context)
    return Work(weights * weight_bytes + batch * unique_context * key_bytes, flops)


def _best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
