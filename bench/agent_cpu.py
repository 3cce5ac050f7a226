"""Agent conversations on the CPU: episodes a minute, in this process and against vLLM's server, the same loop, interleaved.

    python bench/agent_cpu.py [--model smollm2-135m] [--rounds 5] [--vllm PYTHON] [--plot FILE]

32 conversations at once, four tasks of eight members with the same prompt of 512 ids. Each has 4 turns of 32 sampled ids at
temperature 1 with their logprobs, and after each but the last a tool result of 40 ids that comes after 50 ms. vLLM (PYTHON is
an interpreter that has its CPU build) is asked over HTTP, ids in and ids out without streaming, its prefix cache on; the whole
conversation is its prompt each turn. Prompts are new in every round. What is not given is skipped with a message.
"""

import argparse
import os
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import anyio
import httpx
import numpy as np
import torch
from contest import Rates, awake, interleave, peer_environment, plot, table

from agentrt.core.models import find_model
from agentrt.core.protocol import SessionHints
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.local import local_engine

TASKS, MEMBERS, PROMPT, TURNS, SAMPLED, OBSERVED, TOOL_SECONDS = 4, 8, 512, 4, 32, 40, 0.05
CONTEXT = PROMPT + TURNS * (SAMPLED + OBSERVED)
EPISODES = TASKS * MEMBERS
START_SECONDS = 900.0
CASE = "episodes a minute"

Turn = Callable[[list[int]], Awaitable[None]]
"""Observe these ids, then sample."""


async def converse(turn: Turn, prompt: list[int], results: list[list[int]], pause: Callable[[], None]) -> None:
    """The loop of one agent; it does not know whom it asks."""
    await turn(prompt)
    for result in results:
        pause()
        await anyio.sleep(TOOL_SECONDS)
        await turn(result)


def conversations(seeds: np.random.Generator) -> list[tuple[list[int], list[list[int]]]]:
    """Each one's prompt and tool results."""

    def ids(*shape: int) -> np.ndarray:
        return seeds.integers(1000, 40_000, size=shape)

    prompts, results = ids(TASKS, PROMPT), ids(EPISODES, TURNS - 1, OBSERVED)
    return [(prompts[row // MEMBERS].tolist(), results[row].tolist()) for row in range(EPISODES)]


async def ours(folder: Path, seeds: np.random.Generator) -> Rates:
    spec = EngineSpec(kv_tokens=2 * EPISODES * CONTEXT, host_tokens=0)
    async with local_engine(folder, Tokenizer.load(folder), spec) as engine:

        async def agent(number: int, prompt: list[int], results: list[list[int]]) -> None:
            hints = SessionHints(group=str(number // MEMBERS))
            with engine.session(seed=number, hints=hints) as session:

                async def turn(observed: list[int]) -> None:
                    await session.sample(observed, SamplingParams(), max_tokens=SAMPLED)

                await converse(turn, prompt, results, partial(session.pause, "tool"))

        return await _episodes_a_minute(agent, seeds)


async def theirs(url: str, seeds: np.random.Generator) -> Rates:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=EPISODES)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as http:

        async def agent(number: int, prompt: list[int], results: list[list[int]]) -> None:
            context: list[int] = []

            async def turn(observed: list[int]) -> None:
                context.extend(observed)
                asked = {
                    "model": "model", "prompt": context, "max_tokens": SAMPLED, "temperature": 1.0, "ignore_eos": True,
                    "logprobs": 0, "return_token_ids": True, "add_special_tokens": False,
                }  # fmt: skip
                said = (await http.post("/v1/completions", json=asked)).raise_for_status().json()["choices"][0]
                assert len(said["token_ids"]) == len(said["logprobs"]["token_logprobs"]) == SAMPLED
                context.extend(said["token_ids"])

            await converse(turn, prompt, results, lambda: None)

        return await _episodes_a_minute(agent, seeds)


async def _episodes_a_minute(
    agent: Callable[[int, list[int], list[list[int]]], Awaitable[None]], seeds: np.random.Generator
) -> Rates:
    work = conversations(seeds)
    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for number, (prompt, results) in enumerate(work):
            group.start_soon(agent, number, prompt, results)
    return {CASE: 60 * EPISODES / (time.perf_counter() - started)}


@contextmanager
def vllm_server(python: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """It and its address, once it answers; it is stopped outside `awake`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "model",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "1024",
        "--max-num-seqs", str(EPISODES), "--enable-prefix-caching", "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    cores = f"0-{torch.get_num_threads() - 1}"
    variables = peer_environment() | {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "HF_HUB_OFFLINE": "1",
    }
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=nowhere, stderr=nowhere, env=variables, start_new_session=True) as server:
        try:
            with awake(server):
                _wait(f"http://127.0.0.1:{port}/health", server)
            yield server, f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"vLLM's server ended with status {server.returncode} before it answered")
        try:
            if httpx.get(url, trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(1.0)
    raise SystemExit(f"vLLM's server did not answer within {START_SECONDS:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    folder, seeds = find_model(options.model), np.random.default_rng(0)
    print(f"agentrt: float16 weights, float32 sums and KV; torch {version('torch')}, {torch.get_num_threads()} threads")
    print(f"load average {os.getloadavg()[0]:.1f}")
    runs: dict[str, Callable[[], Rates]] = {"agentrt": lambda: anyio.run(ours, folder, seeds)}
    if not options.vllm:
        print("vLLM: skipped, it is not given")
        found = interleave(runs, options.rounds)
    else:
        with vllm_server(options.vllm, folder) as (server, url):

            def run() -> Rates:
                with awake(server):
                    return anyio.run(theirs, url, seeds)

            found = interleave(runs | {"vLLM fp32": run}, options.rounds)
    print(table(found, "agentrt", f"{EPISODES} conversations", [name for name in found if name != "agentrt"]))
    print(f"{statistics.median(found['agentrt'][CASE]) * TURNS * SAMPLED / 60:.0f} sampled ids a second")
    if options.plot:
        plot(found, f"{options.model}, {EPISODES} conversations of {TURNS} turns", options.plot)


if __name__ == "__main__":
    main()
