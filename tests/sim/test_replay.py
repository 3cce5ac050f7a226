"""A recorded run played again: the same turns, tools and times, whatever the policy."""

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from agentrt.cli import app
from agentrt.core.errors import UsageError
from agentrt.core.records import BranchRecord, CallRecord, EpisodeRecord, StopReason, TurnRecord
from agentrt.core.spec import EngineSpec, RunSpec
from agentrt.core.tokens import Floats, Ids, Mask
from agentrt.env.chat.message import ToolCall
from agentrt.rollout.sink import RunFolder
from agentrt.sim.cell import simulate
from agentrt.sim.replay import ReplayLoad, Step, recording, replay_spec, steps_of

TURNS = ((100, 130), (170, 190), (200, 260))
"""Where each turn of an episode starts and ends."""


def episode(task: str, member: int, seconds: float = 2.0) -> EpisodeRecord:
    length = TURNS[-1][1]
    ids = Ids([7 + place if place < 100 else 1000 * member + place for place in range(length)])
    mask = Mask(any(start <= place < end for start, end in TURNS) for place in range(length))
    turns = [TurnRecord(start=start, end=end, seed=0, finish_reason="stop") for start, end in TURNS]
    branch = BranchRecord(
        name="main", token_ids=ids, mask=mask, logprobs=Floats([0.0] * length), versions=Ids([0] * length), turns=turns
    )
    call = CallRecord(turn=0, name="look up", arguments={"x": 1}, outcome="ok", result="", seconds=seconds)
    return EpisodeRecord(
        task_id=task, member=member, attempt=0, seed=0, status="ok", stop_reason=StopReason.COMPLETED, truncated=False,
        reward=1.0, branches=[branch], calls=[call],
    )  # fmt: skip


@pytest.mark.parametrize("pool", ["-5", "15"])
def test_a_pool_holds_a_page(folder: Path, pool: str) -> None:
    done = CliRunner().invoke(app, ["replay", str(folder), "--pool", pool])
    assert str(done.exception) == f"--pool must hold a page of 16 ids at least, not {pool}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    spec = RunSpec(environment="any", max_concurrent=3, engine=EngineSpec(kv_tokens=512, host_tokens=1024))
    with RunFolder.create(path, spec, {}) as run:
        for task in ("one", "two words"):
            for member in range(2):
                run.write(episode(task, member))
    return path


def test_turns_and_calls_of_a_record() -> None:
    steps = steps_of(episode("one", 1))
    assert [(len(step.observed), step.sampled) for step in steps] == [(100, 30), (40, 20), (10, 60)]
    assert steps[1] == Step(list(range(1130, 1170)), 20, [])
    assert steps[0].calls == [ToolCall("look up", {"seconds": 2.0})]


def test_calls_of_others_are_not_the_main_branchs() -> None:
    """A critic's call after its own first turn, and one of the main agent before its first."""
    record = episode("one", 1)
    own = record.calls[0]
    others = [msgspec.structs.replace(own, branch="critic", seconds=9.0), msgspec.structs.replace(own, turn=-1)]
    assert steps_of(msgspec.structs.replace(record, calls=[*others, own])) == steps_of(record)


def test_the_recorded_engine_is_the_default(folder: Path) -> None:
    spec = replay_spec(recording(folder))
    assert (spec.pool_tokens, spec.host_share, spec.page_size, spec.live) == (512, 2.0, 16, 3)
    load = ReplayLoad(recording(folder))
    assert load.mean_context() == pytest.approx((130 + 190 + 260) / 3)
    assert load.limits() == (260 + 60, 60, 5.0)


@pytest.mark.parametrize("policy", ["priced", "lru_drop", "unlimited"])
def test_every_turn_is_played(folder: Path, policy: str) -> None:
    recorded = recording(folder)
    cell = simulate(replay_spec(recorded).with_(policy=policy), ReplayLoad(recorded))
    assert (cell.episodes, cell.failed, cell.turns, cell.tokens_sampled) == (4, 0, 12, 4 * 110)
    assert cell.seconds > 2 * 2.0, "three at a time: the fourth begins when one has ended"
    assert policy == "lru_drop" or cell.tokens_reprefilled == 0


def test_the_command_compares_policies(folder: Path) -> None:
    result = CliRunner().invoke(
        app, ["replay", str(folder), "--policy", "lru,priced", "--json"], catch_exceptions=False
    )
    cells = json.loads(result.stdout.splitlines()[-1])["cells"]
    assert [(cell["policy"], cell["turns"]) for cell in cells] == [("lru", 12), ("priced", 12)]


def test_a_run_without_a_good_episode_is_refused(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RunSpec(environment="any"), {}) as run:
        run.write(_failed())
    with pytest.raises(UsageError, match="no finished episode to replay"):
        recording(tmp_path / "run")


def _failed() -> EpisodeRecord:
    return EpisodeRecord(
        task_id="one", member=0, attempt=0, seed=0, status="error", stop_reason=StopReason.ERROR, truncated=False,
        reward=None,
    )  # fmt: skip
