"""A real engine over a toy model, for what needs steps, slots and pages. Apart from `standing`, because it imports torch."""

import time

import numpy as np
from numpy.typing import NDArray
from standing import BYTES

from agentrt.core.protocol import EngineInfo
from agentrt.core.spec import EngineSpec
from agentrt.engine.batch import Batch
from agentrt.engine.service import EngineService
from agentrt.engine.step import EngineCore
from agentrt.testing.toy import ToyRunner, hashed_logits


class SteadyRunner(ToyRunner):
    """A toy whose steps take real time."""

    seconds = 0.0

    def run(self, batch: Batch) -> NDArray[np.float32]:
        time.sleep(self.seconds)
        return super().run(batch)


def toy_engine(*, pages: int = 2048, seconds: float = 0.002, max_batch: int = 16) -> EngineService:
    """A real engine over a toy model that says bytes and never ends its turn by itself."""
    runner = SteadyRunner(hashed_logits(128), num_pages=pages, page_size=4)
    runner.seconds = seconds
    spec = EngineSpec(page_size=4, kv_tokens=4 * pages, max_batch=max_batch)
    vocabulary = BYTES.tokenizer
    core = EngineCore(runner, spec, vocab_size=128, bytes_of=vocabulary.bytes_of)
    info = EngineInfo(model="toy", model_hash="", vocab_size=vocabulary.vocab_size, context_length=8192)
    return EngineService(core, info)
