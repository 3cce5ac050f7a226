"""What requests in flight see of a weight update: the gap between the last id of the old policy and the first of the new.

    python bench/update.py [--model smollm2-135m] [--requests 4] [--prompt 256] [--rounds 3]

Requests decode; new weights (tensors in this process, float32) are read beside them and take effect between two steps. The
aims: mode keep, one step and the pause; mode recompute, the request's own prefill besides, at the rate of the first prefill
of the same round. A step is the median gap between two ids of a request, before the update and while it is read.
Modes alternate; figures are medians over rounds, of the slowest request of a round.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import anyio
import torch
from torch import Tensor

from agentrt.core.models import find_model
from agentrt.core.protocol import Session, UpdateMode
from agentrt.core.seeds import derive
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.local import local_engine
from agentrt.engine.model.config import load_config
from agentrt.engine.model.loader import read_weights
from agentrt.engine.service import EngineService

WARM, AFTER, MOST = 16, 4, 1500
"""Ids of each request before the update is asked for, at least after it, and at most in all."""
MODES: tuple[UpdateMode, ...] = ("keep", "recompute")


class Round(NamedTuple):
    """Seconds, but for `dropped`."""

    step: float
    step_beside: float
    """While the new weights are read."""
    read: float
    pause: float
    gap: float
    allowed: float
    dropped: int


class Request:
    """One that decodes, and when each of its ids was there."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.times: list[float] = []
        """Of sampled ids, in order."""

    @property
    def num_sampled(self) -> int:
        return len(self.times)

    def note(self) -> None:
        new = self.session.tokens.num_sampled - len(self.times)
        self.times += [time.perf_counter()] * new

    async def run(self, prompt: Sequence[int]) -> None:
        await self.session.sample(prompt, SamplingParams(), max_tokens=MOST, progress=self.note)

    def gaps(self, start: float, stop: float) -> list[float]:
        """Between ids that came within a time."""
        within = [one for one in self.times if start <= one <= stop]
        return [b - a for a, b in pairwise(within)]

    def gap_at(self, version: int) -> float:
        """From the last id before `version` to its first."""
        sampled = [one for one in self.session.tokens.versions if one >= 0]
        first = sampled.index(version)
        return self.times[first] - self.times[first - 1]


async def play(
    engine: EngineService, weights: dict[str, Tensor], mode: UpdateMode, requests: int, length: int
) -> Round:
    """One update under load."""
    version, running = engine.statistics().version + 1, list[Request]()
    async with anyio.create_task_group() as group:
        started = time.perf_counter()
        for which in range(requests):
            session = engine.session(seed=derive(version, which), salt=f"{version}/{which}")
            running.append(Request(session.__enter__()))
            prompt = [1 + derive(version, which, place) % 500 for place in range(length)]
            group.start_soon(running[-1].run, prompt)
        await until(running, WARM)
        prefill = max(one.times[0] for one in running) - started
        asked = time.perf_counter()
        report = await engine.update_weights(version, weights, mode)
        done = time.perf_counter()
        await until(running, max(one.num_sampled for one in running) + AFTER)
        group.cancel_scope.cancel()
    step = statistics.median(gap for one in running for gap in one.gaps(started, asked))
    beside = statistics.median(
        [gap for one in running for gap in one.gaps(asked, done - report.pause_seconds)] or [step]
    )
    again = report.tokens_dropped * prefill / (requests * length)
    gap = max(one.gap_at(version) for one in running)
    for one in running:
        one.session.__exit__(None, None, None)
    return Round(
        step, beside, report.read_seconds, report.pause_seconds, gap, beside + report.pause_seconds + again,
        report.tokens_dropped,
    )  # fmt: skip


async def until(running: Sequence[Request], count: int) -> None:
    while min(one.num_sampled for one in running) < count:  # noqa: ASYNC110 - a bench, and the engine has no event for it
        await anyio.sleep(0.002)


async def measure(folder: Path, requests: int, length: int, rounds: int) -> dict[UpdateMode, list[Round]]:
    """Rounds by mode, after one that warms up."""
    spec = EngineSpec(kv_tokens=requests * (length + MOST), host_tokens=0)
    engine = local_engine(folder, Tokenizer.load(folder), spec)
    weights = {name: tensor.float() for name, tensor in read_weights(folder, load_config(folder)).items()}
    found: dict[UpdateMode, list[Round]] = {mode: [] for mode in MODES}
    async with engine:
        await play(engine, weights, "keep", requests, length)
        for _ in range(rounds):
            for mode in MODES:
                found[mode].append(await play(engine, weights, mode, requests, length))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    for name, default in (("requests", 4), ("prompt", 256), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    run = partial(measure, find_model(options.model), options.requests, options.prompt, options.rounds)
    print(f"{options.model}, {options.requests} requests, float32, {torch.get_num_threads()} threads; milliseconds")
    for mode, rounds in anyio.run(run).items():
        step, beside, read, pause, gap, allowed, dropped = (
            statistics.median(values) for values in zip(*rounds, strict=True)
        )
        ratio = statistics.median(one.gap / one.allowed for one in rounds)
        print(
            f"{mode:>9}: gap {gap * 1e3:.1f}, allowed {allowed * 1e3:.1f}, gap / allowed {ratio:.2f}; step {step * 1e3:.1f}, "
            f"while reading {beside * 1e3:.1f}; pause {pause * 1e3:.2f}, read {read * 1e3:.0f}; computed again {dropped:.0f}"
        )


if __name__ == "__main__":
    main()
