"""The cost of the episode loop alone, over a scripted engine: turns a second on one core, memory of a waiting episode.

    python bench/loop.py

Rates are of CPU seconds after a warm-up; every figure is the median of three runs, each in a process of its own. A turn
is all of it: a scripted completion of about 60 ids, parsing, a checked tool call, the join, its share of the record. An
episode's memory is the growth of resident memory over many episodes that wait for the engine.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio

from agentrt import Environment, Limits, Message, Task, reward
from agentrt.env.environment import Episode
from agentrt.rollout.dispatcher import dispatch
from agentrt.rollout.resume import Ledger
from agentrt.testing import Answer, FakeSandbox, MemorySink, ScriptedEngine, called, fake_tool, said, stage

RUNS = 3
TURNS, EPISODES = 16, 500
WAITING = {2_048: 5_000, 32_768: 1_000}
"""Context in tokens, and how many episodes wait with it: memory is linear in their number."""
PAGE_BYTES = resource.getpagesize()


class Adder(Environment):
    """Calls a tool each turn until the script ends."""

    tools = (fake_tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),)

    def __init__(self, prompt: str = "Add one, again and again.") -> None:
        self.prompt = prompt

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        for index in range(10_000):
            yield Task(f"{split}-{index}", (Message("user", self.prompt),))

    @reward(weight=1.0)
    async def answered(self, episode: Episode) -> float:
        return float(bool(episode.answer))


async def add(arguments: dict[str, Any]) -> str:
    return str(arguments["a"] + 1)


async def turns_per_second() -> float:
    """Turns of sampling, parsing, a tool call and the record, per CPU second."""
    script = [said(called("add", f'{{"a": {turn}}}')) for turn in range(TURNS - 1)] + [said("Done.")]
    engine = ScriptedEngine(script, keep_requests=False)
    setup = stage(Adder(), engine, sandbox=FakeSandbox({"add": add}), limits=Limits(max_idle_turns=None))
    plans = Ledger().left([task async for task in first(EPISODES // 4)], 4, as_group=False)
    await dispatch(setup, plans[:2], MemorySink(), MemorySink(), max_concurrent=64)
    sink, started = MemorySink(), time.process_time()
    await dispatch(setup, plans, sink, sink, max_concurrent=64)
    seconds = time.process_time() - started
    assert all(len(record.branches[0].turns) == TURNS for record in sink.records)
    return EPISODES * TURNS / seconds


async def bytes_per_waiting_episode(context: int) -> float:
    """Resident bytes of one episode that waits in its first turn, with a prompt of `context` ids."""
    count = WAITING[context]
    engine = ScriptedEngine([Answer(said("x"), seconds=1e9)], context_length=2 * context, keep_requests=False)
    prompt = "x" * (context - 400)
    setup = stage(Adder(), engine, limits=Limits(wall_seconds=None))
    async with anyio.create_task_group() as episodes:
        tasks = [Task(f"t{index}", (Message("user", prompt + f"{index:08}"),)) for index in range(count)]
        before = resident()
        sink = MemorySink()
        plans = Ledger().left(tasks, 1, as_group=False)
        episodes.start_soon(lambda: dispatch(setup, plans, sink, sink, max_concurrent=count))
        while engine.num_sessions < count:  # noqa: ASYNC110 - a bench, and the engine has no event for it
            await anyio.sleep(0.05)
        grown = resident() - before
        episodes.cancel_scope.cancel()
    return grown / count


async def first(count: int) -> AsyncIterator[Task]:
    async for task in Adder().tasks("train"):
        if count == 0:
            return
        count -= 1
        yield task


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def measured(name: str) -> float:
    """The median over runs of one figure, each in a fresh process."""
    figures = [json.loads(subprocess.check_output([sys.executable, __file__, name])) for _ in range(RUNS)]
    return statistics.median(figures)


def main() -> None:
    if len(sys.argv) == 2:
        name = sys.argv[1]
        figure = anyio.run(turns_per_second) if name == "turns" else anyio.run(bytes_per_waiting_episode, int(name))
        print(figure)
        return
    print(f"turns a second on one core: {measured('turns'):.0f}  (aim: 3000)")
    for context in WAITING:
        used, aim = measured(str(context)), 100_000 + 16 * context
        print(f"a waiting episode, {context} tokens: {used / 1000:.1f} kB  (aim: {aim / 1000:.1f})")


if __name__ == "__main__":
    main()
