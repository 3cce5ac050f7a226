"""KV while tools run, on a real model: half the pages that the conversations need, under simple policies and the priced one.

    python bench/kv_cpu.py [--model smollm2-135m] [--episodes 6] [--turns 5]

Plays conversations with tools that take a while against the real engine: with pages for all (unlimited), and with half of
them under each policy (`lru_drop` has no host tier). Prints whole-run times, tokens prefilled again, whether ids and logprob
bits are those of the unlimited pool, and how the priced policy does beside the best simple one; then what a pause and a
resume cost with 5,000 leases.
"""

import argparse
import statistics
import time

import anyio

from agentrt.core.models import find_model
from agentrt.core.protocol import EngineStatistics
from agentrt.core.seeds import derive
from agentrt.core.spec import EngineSpec, KVPolicy, SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.core.tokens import Ids
from agentrt.engine.kv.cache import KVCache
from agentrt.engine.kv.group import Group
from agentrt.engine.kv.lease import Pause
from agentrt.engine.kv.radix import Namespace
from agentrt.engine.local import local_engine
from agentrt.engine.service import EngineService

PROMPT, OBSERVED, SAMPLED = 256, 32, 24
"""Ids of a prompt, of what a tool brings, and of a turn."""
LEASES = 5000
SIMPLE: tuple[KVPolicy, ...] = ("lru", "lru_drop", "ttl")
PRICED: KVPolicy = "priced"

Said = list[tuple[list[int], list[float]]]


async def converse(engine: EngineService, which: int, turns: int, tool_seconds: float) -> tuple[list[int], list[float]]:
    """One episode."""
    with engine.session(seed=which) as session:
        ids = [1 + derive(which, place) % 500 for place in range(PROMPT)]
        for turn in range(turns):
            await session.sample(ids, SamplingParams(), max_tokens=SAMPLED)
            session.pause("tool", deadline=10.0)
            await anyio.sleep(tool_seconds * (1 + derive(which, turn, 7) % 3))
            session.resume()
            ids = [1 + derive(which, turn, place) % 500 for place in range(OBSERVED)]
        return session.tokens.token_ids.tolist(), session.tokens.logprobs.tolist()


async def run(
    model: str, spec: EngineSpec, episodes: int, turns: int, tool: float
) -> tuple[float, Said, EngineStatistics]:
    """All episodes at once; the seconds, what was said, and the engine's counts."""
    folder = find_model(model)
    engine = local_engine(folder, Tokenizer.load(folder), spec)
    said: Said = [([], [])] * episodes

    async def one(which: int) -> None:
        said[which] = await converse(engine, which, turns, tool)

    async with engine:
        started = time.perf_counter()
        async with anyio.create_task_group() as group:
            for which in range(episodes):
                group.start_soon(one, which)
        return time.perf_counter() - started, said, engine.statistics()


def pause_microseconds() -> tuple[float, float]:
    """Medians of a pause and a resume with 5,000 leases of eight pages, each in a tree of its own conversation."""
    cache = KVCache([Group(LEASES * 8 + 8)], 16)
    leases = []
    for which in range(LEASES):
        lease, ids = cache.open(Namespace(0)), Ids([which % 251, which // 251, *range(126)])
        cache.resume(lease, ids, 127)
        cache.grow(lease, 128)
        cache.advance(lease, ids, 128)
        cache.suspend(lease, ids)
        leases.append(lease)
    pauses, resumes = [], []
    for lease in leases:
        started = time.perf_counter()
        cache.pause(lease, Pause("tool"))
        paused = time.perf_counter()
        cache.unpause(lease)
        pauses.append(paused - started)
        resumes.append(time.perf_counter() - paused)
    return 1e6 * statistics.median(pauses), 1e6 * statistics.median(resumes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sprout")
    parser.add_argument("--episodes", type=int, default=6)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tool-seconds", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    need = options.episodes * (PROMPT + options.turns * (OBSERVED + SAMPLED))
    specs = {"unlimited": EngineSpec(kv_tokens=2 * need, host_tokens=0)} | {
        policy: EngineSpec(kv_tokens=need // 2, host_tokens=2 * need, kv_policy=policy) for policy in (*SIMPLE, PRICED)
    }
    seconds: dict[str, list[float]] = {name: [] for name in specs}
    again = dict.fromkeys(specs, 0)
    for _ in range(options.rounds):
        expected: Said = []
        for name, spec in specs.items():
            took, said, counts = anyio.run(
                run, options.model, spec, options.episodes, options.turns, options.tool_seconds
            )
            expected = expected or said
            seconds[name].append(took)
            again[name] = counts.tokens_reprefilled
            same = "the same ids and bits" if said == expected else "OTHER IDS OR BITS"
            print(f"{name:10} {took:6.2f} s  {again[name]:6} prefilled again  {same}", flush=True)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(
        f"{options.model}, float32 KV, {options.episodes} episodes of {options.turns} turns, {need} ids needed, medians:"
    )
    for name, median in medians.items():
        print(f"  {name:10} {median:6.2f} s, {median / medians['unlimited']:.3f} of unlimited")
    best = min(SIMPLE, key=lambda policy: medians[policy])
    print(f"  prefilled again: {', '.join(f'{name} {count}' for name, count in again.items())}")
    print(f"  {PRICED} takes {medians[PRICED] / medians[best]:.3f} of the time of {best}, the best simple policy")
    pause, resume = pause_microseconds()
    print(f"with {LEASES} leases, medians: a pause {pause:.1f} us, a resume {resume:.1f} us")


if __name__ == "__main__":
    main()
