"""The engine in a thread of this process and in a process of its own, beside an event loop that is idle, busy, saturated.

    python bench/apart.py [--model sprout] [--sequences 16]

In its own process it is `agentrt serve`, asked over HTTP on this machine, as `engine.engines` has it. Prints the ids that
arrive a second, medians of rounds in which all six cases follow one another. The loop's work is that of bench/steps.py, which
also says what it is.
"""

import argparse
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from steps import LOADS, ROUNDS, SECONDS, SWITCH_SECONDS, keep_busy

from agentrt.core.models import find_model
from agentrt.core.protocol import Engine
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.local import local_engine
from agentrt.engine.remote.engine import RemoteEngine


@contextmanager
def served(model: str) -> Iterator[str]:
    """The URL of a process that serves the model."""
    command = [sys.executable, "-m", "agentrt", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        yield next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+", line)))
        server.send_signal(signal.SIGINT)


async def decode(engine: Engine, seed: int) -> None:
    """One sequence that decodes until it is cancelled."""
    with engine.session(seed=seed) as session:
        while True:
            await session.sample([1 + seed], SamplingParams(), max_tokens=64)


async def rate(engine: Engine, sequences: int, share: float) -> float:
    """Ids a second."""
    async with anyio.create_task_group() as work:
        for seed in range(sequences):
            work.start_soon(decode, engine, seed)
        work.start_soon(keep_busy, share)
        await anyio.sleep(0.5)
        before, started = engine.statistics().tokens_sampled, time.perf_counter()
        await anyio.sleep(SECONDS)
        found = (engine.statistics().tokens_sampled - before) / (time.perf_counter() - started)
        work.cancel_scope.cancel()
    return found


async def measure(engines: dict[str, Engine], sequences: int) -> dict[tuple[str, str], list[float]]:
    """By load and place."""
    found: dict[tuple[str, str], list[float]] = {(load, place): [] for load in LOADS for place in engines}
    async with engines["thread"], engines["process"]:
        for _ in range(ROUNDS):
            for load, place in found:
                found[load, place].append(await rate(engines[place], sequences, LOADS[load]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sprout")
    parser.add_argument("--sequences", type=int, default=16)
    options = parser.parse_args()
    folder = find_model(options.model)
    tokenizer = Tokenizer.load(folder)
    with served(options.model) as url:
        engines: dict[str, Engine] = {
            "thread": local_engine(folder, tokenizer, EngineSpec()),
            "process": RemoteEngine([url], tokenizer),
        }
        sys.setswitchinterval(SWITCH_SECONDS)
        found = anyio.run(measure, engines, options.sequences)
    for load in LOADS:
        thread, process = (statistics.median(found[load, place]) for place in engines)
        print(f"{load:<10} thread {thread:7.0f} ids/s  process {process:7.0f} ids/s  {process / thread:.2f}")


if __name__ == "__main__":
    main()
