"""Graders that hang (C23), graders that are programs, and permits that count what they say."""

import textwrap
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from agentrt import Environment, Limits, Message, RunSpec, Task, Tool, group_reward, reward, tool
from agentrt.core.protocol import EngineInfo
from agentrt.core.spec import EngineSpec
from agentrt.engine.batch import Batch
from agentrt.engine.service import EngineService
from agentrt.engine.step import EngineCore
from agentrt.env.chat.chatml import ChatML
from agentrt.env.environment import Agent, Episode
from agentrt.rollout.dispatcher import dispatch
from agentrt.rollout.play import run_episode
from agentrt.rollout.resume import Ledger
from agentrt.rollout.setup import Setup
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.sandbox import Sandbox
from agentrt.testing import FakeSandbox, MemorySink, ScriptedEngine, byte_tokenizer, said, stage
from agentrt.testing.toy import ToyRunner, hashed_logits

pytestmark = pytest.mark.anyio

TASK = Task("t", (Message("user", "q"),))
MARK, VOCAB = "c23-grader", 262
CHECKER = f"""
    import ctypes, json, os, sys
    call = json.loads(sys.stdin.readline())
    ctypes.CDLL(None).prctl(15, b"{MARK}")
    while call["spin"]:
        pass
    found = sorted(os.listdir("."))
    os.write(int(os.environ["AGENTRT_REPLY_FD"]), json.dumps({{"result": " ".join(found)}}).encode() + b"\\n")
"""
MANIFEST = 'name = "checker"\ndescription = "Checks."\n[parameters]\ntype = "object"\n'


@pytest.fixture
def checker(tmp_path: Path) -> Tool:
    return program(tmp_path, textwrap.dedent(CHECKER))


@pytest.fixture
def broken(tmp_path: Path) -> Tool:
    return program(tmp_path, "import sys; sys.exit('no such file')")


def program(folder: Path, code: str) -> Tool:
    (folder / "checker.py").write_text(code)
    (folder / "checker.toml").write_text(MANIFEST)
    return tool(folder / "checker.py")


class Checked(Environment):
    """The reward is a program's word; for the first two tasks it never comes."""

    def __init__(self, checker: Tool, stuck: Sequence[str] = ("t0", "t1")) -> None:
        self.checker, self.stuck = checker, stuck

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        for index in range(4):
            yield Task(f"t{index}", (Message("user", "q"),), {}, {"given.txt": "x"})

    @reward(weight=1.0)
    async def checked(self, episode: Episode) -> float:
        return float(await episode.run(self.checker, {"spin": episode.task.id in self.stuck}) == "given.txt")


async def test_a_group_reward_cannot_run_a_checker(checker: Tool) -> None:
    """It would look into a folder that is gone, and find nothing."""

    class Late(Checked):
        @group_reward
        async def together(self, episodes: Sequence[Episode]) -> list[float]:
            return [float(len(await episode.run(self.checker, {"spin": False}))) for episode in episodes]

    sink, setup, permits = MemorySink(), stage(Late(checker, ()), ScriptedEngine([said("x")])), Permits(2)
    setup.sandboxes = lambda: Sandbox(permits)
    task = Task("t", (Message("user", "q"),), {}, {"given.txt": "x"})
    await dispatch(setup, [Ledger().again(task, 2)], sink, sink, max_concurrent=2)
    why = "reward_raised: RuntimeError: the sandbox of the episode is closed, and its folder is gone"
    assert [(one.rewards["checked"].score, one.reward, one.reward_reason) for one in sink.records] == [
        (1.0, None, why)
    ] * 2


def graders() -> list[str]:
    """Living processes that call themselves the grader."""
    names = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            names.append(path.read_text().strip())
        except OSError:
            continue
    return [name for name in names if name == MARK]


async def test_c23_stuck_graders_are_null_and_gone_and_hold_no_permit(checker: Tool) -> None:
    environment = Checked(checker)
    spec = RunSpec(environment="checked", max_concurrent=2, limits=Limits(score_seconds=1.0))
    scripted = stage(environment, ScriptedEngine([said("ok")]))
    setup = Setup(environment=environment, engine=scripted.engine, renderer=scripted.renderer, spec=spec)
    tasks, sink = [task async for task in environment.tasks("train")], MemorySink()
    seen = 0

    async def watch() -> None:
        nonlocal seen
        while not seen:
            seen = max(seen, len(graders()))
            await anyio.sleep(0.05)

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await dispatch(setup, Ledger().left(tasks, 1, as_group=False), sink, sink, max_concurrent=spec.max_concurrent)
        group.cancel_scope.cancel()
    records = {record.task_id: record for record in sink.records}
    assert {name: (one.reward, one.reward_reason) for name, one in records.items()} == {
        "t0": (None, "score_timeout"), "t1": (None, "score_timeout"), "t2": (1.0, None), "t3": (1.0, None),
    }  # fmt: skip
    assert seen, "the grader was never seen alive"
    assert graders() == []
    assert setup.scoring.borrowed_tokens == 0


async def test_a_program_that_fails_gives_no_reward(broken: Tool) -> None:
    setup = stage(Checked(broken), ScriptedEngine([said("ok")]))
    setup.sandboxes = Setup(
        environment=setup.environment, engine=setup.engine, renderer=setup.renderer, spec=RunSpec(environment="x")
    ).sandboxes
    record = await run_episode(setup, TASK)
    assert record.reward is None
    assert "checker: exit_nonzero: no such file" in str(record.reward_reason)


class Judged(Environment):
    """Scored by somebody slow."""

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        yield TASK

    def __init__(self) -> None:
        self.judging = self.most = 0

    @reward
    async def judged(self, episode: Episode) -> float:
        self.judging += 1
        self.most = max(self.most, self.judging)
        await anyio.sleep(0.02)
        self.judging -= 1
        return 1.0


async def test_waiting_to_be_scored_is_not_charged_to_the_grader() -> None:
    environment = Judged()
    spec = RunSpec(environment="judged", max_scoring=2, limits=Limits(score_seconds=1.0))
    scripted = stage(environment, ScriptedEngine([said("ok")]))
    setup = Setup(
        environment=environment, engine=scripted.engine, renderer=scripted.renderer, spec=spec,
        sandboxes=lambda: FakeSandbox({}),
    )  # fmt: skip
    async with anyio.create_task_group() as episodes:
        for member in range(9):
            episodes.start_soon(partial(run_episode, setup, TASK, member=member))
    assert environment.most == 2


class Delegating(Environment):
    """Two sub-agents at once; the episode waits for both."""

    async def rollout(self, task: Task, agent: Agent) -> None:
        async with anyio.create_task_group() as both:
            for name in ("a", "b"):
                both.start_soon(agent.episode.agent(name, Message("user", name)).sample)

    @reward
    async def one(self, episode: Episode) -> float:
        return 1.0


class Counting(ToyRunner):
    """Knows how many sequences decode in a step."""

    most = 0

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.most = max(self.most, len(batch.out_rows_M))
        return super().run(batch)


async def test_c23_sub_agents_wait_for_no_permit_of_their_parent() -> None:
    """One episode permit; its two sub-agents need none. Model requests have the engine's own limit."""
    runner = Counting(hashed_logits(VOCAB), num_pages=256)
    core = EngineCore(runner, EngineSpec(max_batch=1, page_size=4), vocab_size=VOCAB, bytes_of=lambda token_id: b"x")
    info = EngineInfo(model="toy", model_hash="", vocab_size=VOCAB, context_length=512)
    spec = RunSpec(environment="x", max_concurrent=1, limits=Limits(max_turn_tokens=8))
    environment, sink = Delegating(), MemorySink()
    async with EngineService(core, info) as engine:
        setup = Setup(
            environment=environment, engine=engine, renderer=ChatML(byte_tokenizer()), spec=spec,
            sandboxes=lambda: FakeSandbox({}),
        )  # fmt: skip
        plans = Ledger().left([TASK], 1, as_group=False)
        await dispatch(setup, plans, sink, sink, max_concurrent=spec.max_concurrent)
    (record,) = sink.records
    assert (record.status, record.reward) == ("ok", 1.0)
    assert [len(branch.turns) for branch in record.branches] == [0, 1, 1]
    assert runner.most == 1
