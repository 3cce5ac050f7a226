"""How much a busy event loop slows the engine's steps: idle, 30 % busy, saturated, interleaved in one run.

    python bench/steps.py [--model sprout] [--sequences 16]

The loop's work is pure Python in slices of 3 ms with a checkpoint between them, as rendering and parsing are. Steps run in the
engine's own thread; both need the interpreter. Prints the median step time of each and its ratio to idle.
"""

import argparse
import statistics
import sys
import time

import anyio

from agentrt.core.models import find_model
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.local import local_engine
from agentrt.engine.service import EngineService

ROUNDS, SECONDS, SLICE = 5, 2.0, 0.003
LOADS = {"idle": 0.0, "30 % busy": 0.3, "saturated": 1.0}
SWITCH_SECONDS = 0.0005
"""As `agentrt run` sets it."""


async def decode(engine: EngineService, seed: int) -> None:
    """One sequence that decodes until it is cancelled."""
    with engine.session(seed=seed) as session:
        while True:
            await session.sample([1 + seed], SamplingParams(), max_tokens=64)


async def keep_busy(share: float) -> None:
    """Work a share of the time."""
    while share:
        until = time.perf_counter() + SLICE
        while time.perf_counter() < until:
            sum(range(50))
        await anyio.sleep(SLICE * (1 / share - 1))


async def step_milliseconds(engine: EngineService, share: float) -> float:
    """The mean step over `SECONDS`, with the loop busy for `share` of them."""
    async with anyio.create_task_group() as work:
        work.start_soon(keep_busy, share)
        await anyio.sleep(0.2)
        before, started = engine.statistics().steps, time.perf_counter()
        await anyio.sleep(SECONDS)
        steps, seconds = engine.statistics().steps - before, time.perf_counter() - started
        work.cancel_scope.cancel()
    return 1000 * seconds / steps


async def measure(engine: EngineService, sequences: int) -> dict[str, list[float]]:
    """Step times by load, a round of all loads after another."""
    found: dict[str, list[float]] = {name: [] for name in LOADS}
    async with engine, anyio.create_task_group() as decoding:
        for seed in range(sequences):
            decoding.start_soon(decode, engine, seed)
        for _ in range(ROUNDS):
            for name, share in LOADS.items():
                found[name].append(await step_milliseconds(engine, share))
        decoding.cancel_scope.cancel()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sprout")
    parser.add_argument("--sequences", type=int, default=16)
    options = parser.parse_args()
    folder = find_model(options.model)
    engine = local_engine(folder, Tokenizer.load(folder), EngineSpec())
    sys.setswitchinterval(SWITCH_SECONDS)
    found = anyio.run(measure, engine, options.sequences)
    idle = statistics.median(found["idle"])
    for name, times in found.items():
        median = statistics.median(times)
        print(
            f"{name:<10} {median:6.2f} ms a step (of {min(times):.2f} to {max(times):.2f})  {median / idle:.2f} x idle"
        )


if __name__ == "__main__":
    main()
