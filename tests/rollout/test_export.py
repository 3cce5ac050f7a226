"""Records as a Parquet file: array types, forks whose prefix is trained on once, failures apart."""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrt.core.errors import RecordError, UsageError
from agentrt.core.records import (
    BranchRecord,
    CallRecord,
    EpisodeRecord,
    Failure,
    Fork,
    Score,
    StopReason,
    TurnRecord,
)
from agentrt.core.spec import RunSpec
from agentrt.core.tokens import Floats, Ids, Mask
from agentrt.rollout.export import to_parquet
from agentrt.rollout.group import group_record
from agentrt.rollout.sink import RunFolder


def branch(name: str, mask: list[int], fork: Fork | None = None) -> BranchRecord:
    size = len(mask)
    return BranchRecord(
        name=name, fork=fork, token_ids=Ids(range(size)), mask=Mask(mask),
        logprobs=Floats([-0.1 * bit for bit in mask]), versions=Ids([bit - 1 for bit in mask]),
        turns=[TurnRecord(start=1, end=size, seed=2**62, finish_reason="stop", cached_tokens=3)],
    )  # fmt: skip


def record(task: str, member: int, attempt: int, **changed: Any) -> EpisodeRecord:
    values: dict[str, Any] = {
        "seed": 2**62, "status": "ok", "stop_reason": StopReason.COMPLETED, "truncated": False, "reward": 0.5,
        "rewards": {"right": Score(0.5, 1.0), "form": Score(None, 0.1)}, "metrics": {"turns": 1.0},
        "branches": [branch("main", [0, 1, 1])],
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "calls": [{"name": "f"}]}],
        "calls": [CallRecord(turn=0, name="f", arguments={"a": [1, "b"]}, outcome="ok", result="é", seconds=0.5)],
    }  # fmt: skip
    return EpisodeRecord(task_id=task, member=member, attempt=attempt, **(values | changed))


FAILED = {"status": "error", "reward": None, "error": Failure(boundary="engine", type="EngineFailure", message="gone")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    forked = [branch("main", [0, 1, 1]), branch("critic", [0, 1], Fork("main", 2))]
    with RunFolder.create(tmp_path / "run", RunSpec(environment="x"), {}) as run:
        run.write(record("a", 0, 0, **FAILED))
        run.write(record("a", 1, 0, branches=forked, reward=0.0))
        run.write(record("a", 0, 1))
        run.write_group(group_record("a", [0.5, 0.0]))
    return tmp_path / "run"


def test_columns_have_the_types_of_the_arrays(folder: Path) -> None:
    assert to_parquet(folder, folder / "t.parquet") == 3
    fields = {field.name: field.type for field in pq.read_schema(folder / "t.parquet")}
    assert fields["token_ids"] == fields["versions"] == pa.list_(pa.int32())
    assert fields["mask"] == pa.list_(pa.int8())
    assert fields["logprobs"] == pa.list_(pa.float32())
    assert (fields["reward"], fields["seed"]) == (pa.float64(), pa.int64())


def test_the_good_record_of_each_episode_one_row_a_branch(folder: Path) -> None:
    to_parquet(folder, folder / "t.parquet")
    rows = pq.read_table(folder / "t.parquet").to_pylist()
    assert [(row["member"], row["attempt"], row["branch"]) for row in rows] == [
        (1, 0, "main"),
        (1, 0, "critic"),
        (0, 1, "main"),
    ]
    _, critic, first = rows
    assert first["advantage"] == 1.0
    assert first["token_ids"] == [0, 1, 2]
    assert first["mask"] == [0, 1, 1]
    assert first["seed"] == first["turns"][0]["seed"] == 2**62
    assert first["rewards"] == [
        {"name": "right", "score": 0.5, "weight": 1.0},
        {"name": "form", "score": None, "weight": 0.1},
    ]
    assert first["messages"][1]["calls"] == '[{"name":"f"}]'
    assert critic["calls"] == [], "the main agent's are in its own row"
    assert (first["calls"][0]["arguments"], first["calls"][0]["result"]) == ('{"a":[1,"b"]}', "é")
    assert critic["token_ids"] == [0, 1, 0, 1]
    assert critic["mask"] == [0, 0, 0, 1]
    assert critic["versions"] == [-1, -1, -1, 0]
    assert critic["logprobs"][:3] == [0.0, 0.0, 0.0]
    assert (critic["advantage"], critic["messages"]) == (-1.0, [])


def test_failures_are_there_when_asked_for(folder: Path) -> None:
    assert to_parquet(folder, folder / "t.parquet", with_failures=True) == 4
    failed = pq.read_table(folder / "t.parquet").to_pylist()[0]
    assert (failed["status"], failed["error"], failed["reward"]) == ("error", "EngineFailure: gone", None)
    assert failed["advantage"] is None


def test_what_cannot_be_exported(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="not a run folder"):
        to_parquet(tmp_path, tmp_path / "t.parquet")
    with pytest.raises(RecordError, match="cannot be written"):
        to_parquet(folder, folder / "none" / "t.parquet")
    (folder / "groups.jsonl").write_text("{}\n")
    with pytest.raises(RecordError, match=r"groups\.jsonl, line 1") as damaged:
        to_parquet(folder, folder / "t.parquet")
    assert "cannot be written" not in str(damaged.value)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"pip install 'agentrt\[parquet\]'"):
        to_parquet(folder, folder / "t.parquet")
    assert not list(folder.glob("*parquet*"))


def test_the_good_record_is_the_highest_attempt_wherever_it_stands(tmp_path: Path) -> None:
    """A trainer's attempts run side by side, so a later one may be written first; its advantages are those of its rewards."""
    with RunFolder.create(tmp_path / "run", RunSpec(environment="x"), {}) as run:
        for attempt, rewards in ((1, [5.0, 3.0]), (0, [0.0, 1.0])):
            for member, reward in enumerate(rewards):
                run.write(record("a", member, attempt, reward=reward))
            run.write_group(group_record("a", rewards))
    to_parquet(tmp_path / "run", tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [(row["attempt"], row["reward"], row["advantage"]) for row in rows] == [(1, 5.0, 1.0), (1, 3.0, -1.0)]


def test_a_group_that_has_not_ended_has_no_advantages(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RunSpec(environment="x"), {}) as run:
        run.write(record("a", 0, 0))
    to_parquet(tmp_path / "run", tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet")["advantage"].to_pylist() == [None]
