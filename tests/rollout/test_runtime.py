"""Rollouts for a trainer, in virtual time: staleness, back-pressure, filtering, over-sampling, and where every token went."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrt import Environment, Message, RunSpec, Task, reward
from agentrt.core.errors import RecordError
from agentrt.core.records import EpisodeRecord
from agentrt.env.environment import Episode
from agentrt.rollout.account import Fate
from agentrt.rollout.group import Group, num_sampled
from agentrt.rollout.runtime import Rollouts, Runtime
from agentrt.rollout.sink import RunFolder
from agentrt.testing import Answer, ScriptedEngine, said, stage

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(virtual_time: Any) -> Any:
    return virtual_time


class Guess(Environment):
    """Task k; `equal` tasks reward all members alike, in the others the first member is right."""

    def __init__(self, tasks: int | None = None, equal: frozenset[int] = frozenset()) -> None:
        self.num_tasks, self.equal = tasks, equal
        self.begun: Counter[str] = Counter()

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        for index in count() if self.num_tasks is None else range(self.num_tasks):
            yield Task(f"{split}-{index}", (Message("user", f"task {index}"),), {"index": index})

    @reward(weight=1.0)
    async def right(self, episode: Episode) -> float:
        self.begun[episode.task.id] += 1
        return float(self.begun[episode.task.id] == 1 and episode.task.data["index"] not in self.equal)


def engine(seconds: float = 1.0) -> ScriptedEngine:
    return ScriptedEngine(lambda ids: Answer(said("abc"), seconds=seconds), keep_requests=False)


async def batches(runtime: Runtime, environment: Guess, steps: int, batch: int = 2, **pace: int) -> list[list[Group]]:
    """Take `steps` batches of groups of 2, each followed by a second of training and an update."""
    taken: list[list[Group]] = [[]]
    async for group in runtime.rollouts(environment.tasks("train"), group_size=2, batch=batch, **pace):
        taken[-1].append(group)
        if len(taken[-1]) == batch:
            await anyio.sleep(1.0)
            await runtime.update_weights(runtime.version + 1, {})
            if len(taken) == steps:
                break
            taken.append([])
    return taken


def versions(groups: list[Group]) -> list[int]:
    return [max(branch.versions) for group in groups for one in group.episodes for branch in one.branches]


@pytest.mark.parametrize(("max_staleness", "seconds"), [(0, 6.0), (1, 4.0)])
async def test_staleness_is_bounded_and_buys_time(max_staleness: int, seconds: float) -> None:
    """With 0, a second of sampling and one of training take turns; with 1 they overlap."""
    environment = Guess()
    async with Runtime(stage(environment, engine())) as runtime:
        started = anyio.current_time()
        taken = await batches(runtime, environment, 3, max_staleness=max_staleness)
        assert anyio.current_time() - started == pytest.approx(seconds)
    for version, groups in enumerate(taken):
        assert min(versions(groups)) >= version - max_staleness
        assert all(not group.stale for group in groups)


async def test_no_more_groups_start_than_can_be_used() -> None:
    environment = Guess()
    async with Runtime(stage(environment, engine())) as runtime:
        rollouts = runtime.rollouts(environment.tasks("train"), group_size=2, batch=3, max_staleness=1)
        await anyio.sleep(100)
        assert len(environment.begun) == 6
        assert rollouts.account.groups == {Fate.UNUSED: 6}


async def test_groups_without_a_difference_are_replaced_and_counted() -> None:
    environment = Guess(equal=frozenset({0, 1, 3}))
    async with Runtime(stage(environment, engine())) as runtime:
        rollouts = runtime.rollouts(environment.tasks("train"), group_size=2, batch=2)
        taken = [await anext(rollouts), await anext(rollouts)]
        assert {group.record.task_id for group in taken} == {"train-2", "train-4"}
        assert all(group.rows() for group in taken)
        assert rollouts.account.groups == {Fate.TAKEN: 2, Fate.FILTERED: 3, Fate.UNUSED: 0}
        assert rollouts.account.episodes == {Fate.TAKEN: 4, Fate.FILTERED: 6, Fate.UNUSED: 0}
        assert rollouts.account.tokens == {Fate.TAKEN: 16, Fate.FILTERED: 24, Fate.UNUSED: 0}


async def test_groups_without_a_difference_are_handed_over_to_who_wants_them() -> None:
    environment = Guess(equal=frozenset({0, 1, 3}))
    async with Runtime(stage(environment, engine())) as runtime:
        rollouts = runtime.rollouts(environment.tasks("train"), group_size=2, batch=2, keep_equal=True)
        taken = [await anext(rollouts), await anext(rollouts)]
        assert {group.record.task_id for group in taken} == {"train-0", "train-1"}
        assert [row.advantage for group in taken for row in group.rows()] == [0.0] * 4
        assert rollouts.account.groups == {Fate.TAKEN: 2, Fate.UNUSED: 0}


async def test_oversampling_leaves_the_slowest_behind_and_counts_them() -> None:
    environment = Guess()

    def answer(ids: Sequence[int]) -> Answer:
        is_first = b"task 0" in bytes(token_id for token_id in ids if token_id < 256)
        return Answer(said("abc"), seconds=9.0 if is_first else 1.0)

    async with Runtime(stage(environment, ScriptedEngine(answer, keep_requests=False))) as runtime:
        rollouts = runtime.rollouts(environment.tasks("train"), group_size=2, batch=2, extra=1)
        taken = [await anext(rollouts), await anext(rollouts)]
        assert {group.record.task_id for group in taken} == {"train-1", "train-2"}
        await anyio.sleep(3)  # the slow ones have a token by now
        await runtime.update_weights(1, {})
        await anyio.sleep(20)
        later = [await anext(rollouts) for _ in range(4)]
        assert "train-0" not in [group.record.task_id for group in later]
        assert rollouts.account.groups[Fate.STALE] == 1
        assert rollouts.account.episodes[Fate.STALE] == 2


async def test_a_stale_member_goes_and_its_group_stays() -> None:
    """`max_staleness` holds for each sample. The second member started after the update, when there was a permit."""
    environment, scripted = Guess(), engine()
    async with Runtime(stage(environment, scripted), max_concurrent=1) as runtime:
        rollouts = runtime.rollouts(environment.tasks("train"), group_size=2, batch=1)
        await anyio.sleep(0.5)
        scripted.version = 1
        group = await anext(rollouts)
        assert group.stale == {0}
        assert [(row.member, set(row.versions) - {-1}) for row in group.rows()] == [(1, {1})]
        assert group.record.rewards == [1.0, 0.0]
        assert rollouts.account.episodes == {Fate.STALE: 1, Fate.TAKEN: 1, Fate.UNUSED: 0}


async def test_a_trainer_that_never_updates_is_not_starved() -> None:
    environment = Guess(tasks=7)
    async with Runtime(stage(environment, engine())) as runtime:
        groups = [group async for group in runtime.rollouts(environment.tasks("train"), group_size=2, batch=2)]
    assert len(groups) == 7
    assert environment.num_tasks == 7


async def test_every_sampled_token_is_in_one_state_and_on_disk(tmp_path: Path) -> None:
    environment = Guess(tasks=12, equal=frozenset({1, 5}))
    setup = stage(environment, engine())
    with RunFolder.create(tmp_path / "run", RunSpec(environment="guess"), {}) as folder:
        async with Runtime(setup, folder) as runtime:
            rollouts = runtime.rollouts(environment.tasks("train"), group_size=2, batch=2, max_staleness=1)
            for _ in range(3):
                await anext(rollouts)
            await anyio.sleep(100)
            account = rollouts.account
            written = list(folder.trajectories())
            assert sum(account.episodes.values()) == len(written)
            assert sum(account.tokens.values()) == sum(map(num_sampled, written))
            assert sum(account.groups.values()) == len(list(folder.groups()))
        evaluated = await evaluation(setup, folder)
        assert [one.key for one in evaluated] == [("eval-0", 0), ("eval-1", 0)]
        assert len(list(folder.trajectories())) == len(written)


async def evaluation(setup: Any, folder: RunFolder) -> list[EpisodeRecord]:
    async with Runtime(setup, folder) as runtime:
        tasks = [task async for task in Guess(tasks=2).tasks("eval")]
        return await runtime.evaluate(tasks)


async def test_a_task_that_was_there_gets_a_new_attempt(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RunSpec(environment="guess"), {}) as folder:
        for _ in range(2):
            environment = Guess(tasks=1)
            async with Runtime(stage(environment, engine()), folder) as runtime:
                assert [1 async for _ in runtime.rollouts(environment.tasks("train"), group_size=2, batch=1)] == [1]
        keys = [(one.member, one.attempt) for one in folder.trajectories()]
        assert sorted(keys) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert len({one.seed for one in folder.trajectories()}) == 4


async def trained(runtime: Runtime, environment: Guess, error: Exception | None = None) -> None:
    """A trainer that takes what comes, or fails."""
    async with runtime:
        async for _ in runtime.rollouts(environment.tasks("train"), group_size=2, batch=1):
            if error is not None:
                raise error


async def test_a_full_disk_ends_it_with_the_error_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(record: EpisodeRecord) -> None:
        raise RecordError("no space left")

    environment = Guess()
    with RunFolder.create(tmp_path / "run", RunSpec(environment="guess"), {}) as folder:
        monkeypatch.setattr(folder, "write", full)
        with pytest.raises(RecordError, match="no space left"):
            await trained(Runtime(stage(environment, engine()), folder), environment)


def test_tasks_that_await_what_was_cancelled_are_not_at_their_end() -> None:
    """A trainer would have stopped as after the last task."""

    async def leaking() -> AsyncIterator[Task]:
        ended = asyncio.ensure_future(asyncio.sleep(60))
        ended.cancel()
        await ended
        yield Task("t", ())

    async def main() -> None:
        async with Runtime(stage(Guess(), engine())) as runtime:
            async for _ in runtime.rollouts(leaking(), group_size=2, batch=1):
                pass

    with pytest.raises(RuntimeError, match="the tasks raised a CancelledError that nobody asked for"):
        anyio.run(main, backend="asyncio")


async def test_who_waits_for_a_group_hears_of_the_end() -> None:
    """Also when it comes before the rollouts have begun."""
    environment, taken = Guess(), list[Group]()

    async def wait(rollouts: Rollouts) -> None:
        taken.extend([group async for group in rollouts])

    with anyio.fail_after(10):
        async with anyio.create_task_group() as trainers, Runtime(stage(environment, engine())) as runtime:
            for begins in (True, False):
                rollouts = runtime.rollouts(environment.tasks("train"), group_size=2, batch=1)
                trainers.start_soon(wait, rollouts)
                if begins:
                    await anyio.sleep(0.5)
    assert taken == []


@pytest.mark.parametrize("error", [ZeroDivisionError(), ExceptionGroup("both", [KeyError("a"), ValueError("b")])])
async def test_an_error_of_the_trainer_passes_as_it_is(error: Exception) -> None:
    environment, scripted = Guess(), engine()
    with pytest.raises(type(error)) as raised:
        await trained(Runtime(stage(environment, scripted)), environment, error)
    assert raised.value is error
    assert scripted.num_sessions == 0
