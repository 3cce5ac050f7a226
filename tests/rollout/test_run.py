"""Groups of episodes, what a run leaves on disk, and what a resumed run does."""

import errno
import os
from collections.abc import AsyncIterator, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from agentrt import Environment, Limits, Message, RunSpec, Task, group_reward, reward
from agentrt.core import records
from agentrt.core.errors import RecordError, UsageError
from agentrt.core.records import Appender, EpisodeRecord, GroupRecord, good_records
from agentrt.env.chat.message import Turn
from agentrt.env.environment import Episode
from agentrt.rollout.dispatcher import dispatch
from agentrt.rollout.order import chosen_tasks
from agentrt.rollout.resume import Ledger
from agentrt.rollout.run import run
from agentrt.rollout.setup import Setup
from agentrt.rollout.sink import RunFolder, require_new, require_same, stored_run
from agentrt.testing import Answer, MemorySink, ScriptedEngine, said, stage

pytestmark = pytest.mark.anyio


class Several(Environment):
    """Three turns; the hooks of a test decide what goes wrong, by (task id, how many episodes of it began)."""

    def __init__(self, tasks: int = 3) -> None:
        self.num_tasks = tasks
        self.begun: list[str] = []
        self.failing: set[int] = set()
        """Which of the episodes, in the order they begin, raise in their second turn."""

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        for index in range(self.num_tasks):
            yield Task(f"t{index}", (Message("user", f"question {index}"),))

    async def step(self, episode: Episode, turn: Turn) -> Sequence[Message] | None:
        if "number" not in episode.state:
            episode.state["number"] = len(self.begun)
            self.begun.append(episode.task.id)
        turns = episode.state["turns"] = episode.state.get("turns", 0) + 1
        if turns == 2 and episode.state["number"] in self.failing:
            raise ValueError("bad state")
        return None if turns == 3 else [Message("user", "go on")]

    @reward(weight=1.0)
    async def length(self, episode: Episode) -> float:
        return float(len(episode.task.id))


class Compared(Several):
    """Members are scored against each other."""

    @group_reward(weight=2.0)
    async def rank(self, episodes: Sequence[Episode]) -> list[float]:
        return [float(position) for position, _ in enumerate(episodes)]


class StopsAfter(MemorySink):
    """Cancels a scope when a number of episodes has ended."""

    def __init__(self, number: int, scope: anyio.CancelScope) -> None:
        super().__init__()
        self.left, self.scope = number, scope

    def episode_ended(self, record: EpisodeRecord) -> None:
        self.left -= 1
        if self.left == 0:
            self.scope.cancel()


def setup_of(environment: Environment, seconds: float = 0.0) -> Setup:
    return stage(environment, ScriptedEngine([Answer(said("one"), seconds=seconds)] * 3))


def spec_of(**changes: Any) -> RunSpec:
    return msgspec.structs.replace(
        RunSpec(environment="staged", groups=3, group_size=2, max_concurrent=1, limits=Limits()), **changes
    )


def on_disk(path: Path) -> list[EpisodeRecord]:
    return list(records.read(path / "trajectories.jsonl", EpisodeRecord))


def folder_at(path: Path, spec: RunSpec) -> RunFolder:
    return RunFolder.resume(path) if path.exists() else RunFolder.create(path, spec, {"agentrt": "test"})


async def run_in(path: Path, environment: Environment, spec: RunSpec) -> int:
    """A new run in `path`, or a resumed one."""
    with folder_at(path, spec) as folder:
        return await run(setup_of(environment), spec, folder, MemorySink())


async def test_c21_one_bad_episode_leaves_the_others_alone(tmp_path: Path) -> None:
    environment = Several(tasks=1)
    environment.failing = {2}
    await run_in(tmp_path / "out", environment, spec_of(groups=1, group_size=4))
    found = on_disk(tmp_path / "out")
    assert [(record.member, record.status, record.reward) for record in found] == [
        (0, "ok", 2.0), (1, "ok", 2.0), (2, "error", None), (3, "ok", 2.0)
    ]  # fmt: skip
    bad = found[2]
    assert bad.error is not None
    assert (bad.error.type, bad.error.message, bad.error.boundary) == ("ValueError", "bad state", "environment")
    assert 'raise ValueError("bad state")' in bad.error.traceback
    assert [sum(record.branches[0].mask) for record in found] == [12, 12, 8, 12]
    (group,) = records.read(tmp_path / "out" / "groups.jsonl", GroupRecord)
    assert (group.valid, group.advantages) == (3, [0.0, 0.0, None, 0.0])
    assert b"Cancel" not in (tmp_path / "out" / "trajectories.jsonl").read_bytes()


async def test_c22_a_failure_is_no_reward_of_zero(tmp_path: Path) -> None:
    class Mixed(Several):
        @reward(weight=1.0)
        async def length(self, episode: Episode) -> float:
            number = episode.state["number"]
            if number == 2:
                raise KeyError("grader")
            return {0: 1.0, 1: 0.0}.get(number)  # type: ignore[return-value] # the environment never gives a reward

    await run_in(tmp_path / "out", Mixed(tasks=1), spec_of(groups=1, group_size=4))
    found = on_disk(tmp_path / "out")
    assert [record.reward for record in found] == [1.0, 0.0, None, None]
    assert [record.reward_reason for record in found] == [None, None, "reward_raised: KeyError: 'grader'", "no_reward"]
    (group,) = records.read(tmp_path / "out" / "groups.jsonl", GroupRecord)
    assert (group.valid, group.advantages) == (2, [1.0, -1.0, None, None])


async def test_outside_cancellation_is_not_swallowed(tmp_path: Path) -> None:
    class Careless(Several):
        async def step(self, episode: Episode, turn: Turn) -> Sequence[Message] | None:
            try:
                await anyio.sleep_forever()
            except Exception:  # what users write
                return None

    path = tmp_path / "out"
    with anyio.move_on_after(0.2) as scope:
        await run_in(path, Careless(), spec_of())
    assert scope.cancelled_caught
    assert on_disk(path) == []


async def test_max_concurrent_counts_episodes() -> None:
    alive = most = 0
    full = anyio.Event()

    class Counting(Several):
        async def step(self, episode: Episode, turn: Turn) -> Sequence[Message] | None:
            nonlocal alive, most
            alive, most = alive + 1, max(most, alive + 1)
            if alive == 3:
                full.set()
            await full.wait()  # nobody is done before as many are here as may be, however slow the machine
            await anyio.sleep(0.001)
            alive -= 1
            return None

    sink = MemorySink()
    tasks = await chosen_tasks(Counting(tasks=5), "train", 5, 0)
    plans = Ledger().left(tasks, 4, as_group=False)
    await dispatch(setup_of(Counting()), plans, sink, sink, max_concurrent=3)
    assert (most, len(sink.records), len(sink.groups)) == (3, 20, 5)


@pytest.mark.parametrize(
    "tail", [b'{"schema_version":1,"task_id":"t2","mem', b'{"schema_version":1,"task_id":"t2","mem\n\n']
)
async def test_c49_a_torn_record_is_cut_off_and_run_again(tmp_path: Path, tail: bytes) -> None:
    path, spec = tmp_path / "out", spec_of(group_size=1)
    await run_in(path, Several(), spec)
    whole = (path / "trajectories.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (path / "trajectories.jsonl").write_bytes(b"".join(lines[:2]) + tail)
    assert await run_in(path, Several(), spec) == 1
    assert sorted(record.task_id for record in on_disk(path)) == ["t0", "t1", "t2"]
    after = (path / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    assert after[:2] == lines[:2]
    assert len(after) == 3
    assert (path / "trajectories.jsonl.torn").read_bytes() == tail.rstrip(b"\n") + b"\n"
    assert len(list(records.read(path / "groups.jsonl", GroupRecord))) == 3


async def test_c49_a_whole_record_without_its_newline_is_kept(tmp_path: Path) -> None:
    path, spec = tmp_path / "out", spec_of(group_size=1)
    await run_in(path, Several(), spec)
    whole = (path / "trajectories.jsonl").read_bytes()
    (path / "trajectories.jsonl").write_bytes(whole[:-1])
    assert await run_in(path, Several(), spec) == 0
    assert (path / "trajectories.jsonl").read_bytes() == whole


async def test_c49_a_broken_line_in_the_middle_stops(tmp_path: Path) -> None:
    path, spec = tmp_path / "out", spec_of(group_size=1)
    await run_in(path, Several(), spec)
    lines = (path / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    broken = lines[0] + lines[1][:40] + b"\n" + lines[2]
    (path / "trajectories.jsonl").write_bytes(broken)
    with pytest.raises(RecordError, match="line 2"):
        await run_in(path, Several(), spec)
    assert (path / "trajectories.jsonl").read_bytes() == broken


async def test_c52_resume_runs_what_is_missing_and_what_failed(tmp_path: Path) -> None:
    path, spec, environment = tmp_path / "out", spec_of(), Several()
    environment.failing = {1}
    with RunFolder.create(path, spec, {}) as folder, anyio.CancelScope() as scope:
        await run(setup_of(environment), spec, folder, StopsAfter(4, scope))
    assert [record.status for record in on_disk(path)] == ["ok", "error", "ok", "ok"]
    assert await run_in(path, Several(), spec) == 3
    found = on_disk(path)
    good = good_records(found)
    assert len(found) == 7
    assert sorted(good) == [(f"t{task}", member) for task in range(3) for member in range(2)]
    assert [record.attempt for record in found] == [0, 0, 0, 0, 1, 0, 0]
    await run_in(tmp_path / "whole", Several(), spec)
    uninterrupted = good_records(on_disk(tmp_path / "whole"))
    assert {key: record.reward for key, record in good.items()} == {
        key: record.reward for key, record in uninterrupted.items()
    }
    groups, others = path / "groups.jsonl", tmp_path / "whole" / "groups.jsonl"
    assert sorted(groups.read_bytes().splitlines()) == sorted(others.read_bytes().splitlines())
    before = (path / "trajectories.jsonl").read_bytes()
    assert await run_in(path, Several(), spec) == 0
    assert (path / "trajectories.jsonl").read_bytes() == before


async def test_c52_a_group_with_a_missing_member_is_redone_as_a_whole(tmp_path: Path) -> None:
    path, spec, environment = tmp_path / "out", spec_of(groups=2), Compared(tasks=2)
    environment.failing = {2}
    await run_in(path, environment, spec)
    first = on_disk(path)
    assert [record.status for record in first] == ["ok", "ok", "error", "ok"]
    assert [record.reward for record in first] == [2.0, 4.0, None, 2.0]
    redone = first[2].task_id
    assert await run_in(path, Compared(tasks=2), spec) == 2
    again = on_disk(path)[4:]
    assert [(record.task_id, record.member, record.attempt, record.reward) for record in again] == [
        (redone, 0, 1, 2.0), (redone, 1, 1, 4.0)
    ]  # fmt: skip
    lines = (path / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    (path / "trajectories.jsonl").write_bytes(b"".join(lines[:5]))
    assert await run_in(path, Compared(tasks=2), spec) == 2
    assert {record.attempt for record in good_records(on_disk(path)).values() if record.task_id == redone} == {2}
    assert await run_in(path, Compared(tasks=2), spec) == 0


async def test_c52_another_spec_is_refused(tmp_path: Path) -> None:
    path, spec = tmp_path / "out", spec_of()
    RunFolder.create(path, spec, {"agentrt": "1"})
    stored = stored_run(path)
    assert (stored.spec, stored.versions) == (spec, {"agentrt": "1"})
    require_same(path, stored.spec, spec_of())
    with pytest.raises(UsageError, match="another groups and another seed"):
        require_same(path, stored.spec, spec_of(groups=9, seed=3))


async def test_the_spec_survives_run_toml(tmp_path: Path) -> None:
    limits = Limits(max_turns=None, wall_seconds=None, max_episode_tokens=7)
    given = {
        "level": [1, 2],
        "name": "é\u2028",
        "day": date(2026, 1, 31),
        "at": [time(7, 30)],
        "from": datetime(2026, 1, 1),
    }
    spec = spec_of(limits=limits, environment_args=given)
    RunFolder.create(tmp_path / "out", spec, {})
    assert stored_run(tmp_path / "out").spec == spec


async def test_the_same_run_twice_has_the_same_seeds_and_ids(tmp_path: Path) -> None:
    for name in ("a", "b"):
        await run_in(tmp_path / name, Several(), spec_of(seed=3))
    first, second = on_disk(tmp_path / "a"), on_disk(tmp_path / "b")
    assert [(record.key, record.seed, record.branches) for record in first] == [
        (record.key, record.seed, record.branches) for record in second
    ]
    assert len({record.seed for record in first}) == 6


async def test_a_lock_that_there_is_not_is_not_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(records.fcntl, "flock", refused)
    with pytest.raises(
        RecordError, match="cannot be locked: No locks available; choose a folder on another file system"
    ):
        Appender[EpisodeRecord](tmp_path / "t.jsonl")


async def test_folders_that_are_refused(tmp_path: Path) -> None:
    spec = spec_of()
    RunFolder.create(tmp_path / "run", spec, {})
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="--resume"):
        RunFolder.create(tmp_path / "run", spec, {})
    with pytest.raises(UsageError, match="is not a run of agentrt"):
        RunFolder.create(foreign, spec, {})
    with pytest.raises(UsageError, match="is not a run of agentrt"):
        RunFolder.create(tmp_path / "file", spec, {})
    with pytest.raises(UsageError, match="not a run folder"):
        RunFolder.resume(foreign)
    with pytest.raises(
        RecordError, match=r"file/out: cannot be made: .*/file is no folder that can be written; choose another with -o"
    ):
        RunFolder.create(tmp_path / "file" / "out", spec, {})
    (tmp_path / "empty").mkdir()
    for path in ("new", "new/er", "empty"):
        require_new(tmp_path / path)
    with RunFolder.resume(tmp_path / "run"), pytest.raises(RecordError, match="another process"):
        RunFolder.resume(tmp_path / "run").__enter__()
    assert sorted(path.name for path in foreign.iterdir()) == ["thesis.tex"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "missing required field `spec`"),
        ("spec = 3\n[versions]\n", "Expected `object`, got `int`"),
        ("[versions]\n[spec]\nenvironment = 'x'\nlimits = 3\n", "limits: Expected `object`, got `int`"),
        ("[versions]\n[spec]\nenvironment = 'x'\ngroup = 3\n", "unknown key group; did you mean 'groups'"),
        ("spec = ", "not valid TOML"),
    ],
)
async def test_a_run_toml_that_is_not_ours(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UsageError, match=words):
        stored_run(tmp_path)


async def test_a_full_disk_ends_the_run_and_what_is_whole_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_written, write = tmp_path / "out", 0, os.write

    def full_after_two(fd: int, data: bytes) -> int:
        nonlocal num_written
        if b'"task_id"' in data and b'"member":' in data:
            num_written += 1
            if num_written > 2:
                write(fd, data[:10])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(os, "write", full_after_two)
    with pytest.raises(RecordError, match="No space left on device"):
        await run_in(path, Several(), spec_of(max_concurrent=4))
    monkeypatch.undo()
    assert len(on_disk(path)) == 2
    assert await run_in(path, Several(), spec_of(max_concurrent=4)) == 4
    assert len(good_records(on_disk(path))) == 6


async def test_what_is_left_to_run_is_said(tmp_path: Path) -> None:
    """A split with fewer tasks than groups were asked for, and a resume of the one episode that failed."""
    environment, spec, path = Several(tasks=2), spec_of(), tmp_path / "out"
    environment.failing = {1}
    with capture_logs() as logs, folder_at(path, spec) as folder:
        sink = MemorySink()
        await run(setup_of(environment), spec, folder, sink)
    assert sink.events[0] == ("run", 2, 4)
    assert {"event": "split_has_fewer_tasks", "log_level": "warning", "split": "train", "tasks": 2, "groups": 3} in logs
    with folder_at(path, spec) as folder:
        sink = MemorySink()
        await run(setup_of(environment), spec, folder, sink)
    assert sink.events[0] == ("run", 1, 1)
