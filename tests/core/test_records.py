"""Record files: one line a record, strict JSON, and what a crash may leave."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.core import records
from agentrt.core.errors import RecordError
from agentrt.core.protocol import Completion, KVUsage
from agentrt.core.records import (
    Appender,
    BranchRecord,
    CallRecord,
    EpisodeRecord,
    Fork,
    Score,
    StopReason,
    good_records,
    joined,
    turn_record,
)
from agentrt.core.tokens import Floats, Ids, Mask

LINE_BREAKS = "\u0085\u2028\u2029\u000b\u000c\u001c\u001d\u001e\r\n"
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def branch(name: str = "main", ids: Any = (1, 2), fork: Fork | None = None) -> BranchRecord:
    count = len(ids)
    return BranchRecord(
        name=name, fork=fork, token_ids=Ids(ids), mask=Mask([1] * count), logprobs=Floats([-0.5] * count),
        versions=Ids([0] * count),
    )  # fmt: skip


def episode(task_id: str = "t", member: int = 0, attempt: int = 0, text: str = "", **changes: Any) -> EpisodeRecord:
    call = CallRecord(turn=0, name="sh", arguments={"x": text}, outcome="ok", result=text)
    plain = EpisodeRecord(
        task_id=task_id, member=member, attempt=attempt, seed=1, status="ok", stop_reason=StopReason.COMPLETED,
        truncated=False, reward=1.0, rewards={"one": Score(1.0, 1.0)}, branches=[branch()], calls=[call],
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def written(path: Path, *given: EpisodeRecord) -> bytes:
    with Appender[EpisodeRecord](path) as file:
        for record in given:
            file.append(record)
    return path.read_bytes()


def strict(line: bytes) -> Any:
    """Parse as strict JSON: NaN and Infinity raise."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_c50_text_comes_back_code_point_by_code_point(tmp_path: Path, texts: list[str]) -> None:
    path = tmp_path / "text.jsonl"
    path.unlink(missing_ok=True)
    texts = [text + LINE_BREAKS for text in texts]
    data = written(path, *(episode(text=text) for text in texts))
    assert data.count(b"\n") == len(texts)
    found = list(records.read(path, EpisodeRecord))
    assert [record.calls[0].result for record in found] == texts
    assert [record.calls[0].arguments["x"] for record in found] == texts


def test_c50_the_case(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    written(path, episode(text="x\u0085y\u2028z"), episode("u"))
    first, second = records.read(path, EpisodeRecord)
    assert (first.calls[0].result, second.task_id) == ("x\u0085y\u2028z", "u")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_c51_what_is_written_is_strict_json(tmp_path: Path, bad: float) -> None:
    call = CallRecord(turn=0, name="f", arguments={"a": bad}, outcome="bad_arguments", result="")
    data = written(tmp_path / "t.jsonl", episode(calls=[call]))
    assert strict(data)["calls"][0]["arguments"] == {"a": None}


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans(), finite, st.integers(-1, 9)), max_size=20))
def test_arrays_come_back_bit_by_bit(items: list[tuple[int, bool, float, int]]) -> None:
    ids, mask, logprobs, versions = zip(*items, strict=True) if items else ((), (), (), ())
    given = BranchRecord(
        name="b", token_ids=Ids(ids), mask=Mask(map(int, mask)), logprobs=Floats(logprobs), versions=Ids(versions)
    )
    line = records.encode(episode(branches=[given]))
    strict(line)
    (found,) = records.decode(line, EpisodeRecord).branches
    assert found.logprobs.tobytes() == given.logprobs.tobytes()
    assert (found.token_ids, found.mask, found.versions) == (given.token_ids, given.mask, given.versions)
    assert (type(found.token_ids), type(found.mask), type(found.logprobs)) == (Ids, Mask, Floats)


def test_arrays_of_different_length_are_no_record() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        BranchRecord(name="b", token_ids=Ids([1]), mask=Mask(), logprobs=Floats([0.0]), versions=Ids([0]))


@given(st.integers(1, 4), st.data())
def test_c49_a_crash_at_any_byte_costs_at_most_the_last_record(tmp_path: Path, count: int, data: st.DataObject) -> None:
    path = tmp_path / "crash.jsonl"
    for old in (path, path.with_name("crash.jsonl.torn")):
        old.unlink(missing_ok=True)
    lines = written(path, *(episode(f"e{n}", text="é\u2028") for n in range(count))).splitlines(keepends=True)
    whole = b"".join(lines)
    cut = data.draw(st.integers(len(whole) - len(lines[-1]), len(whole)))
    path.write_bytes(whole[:cut])
    tail = records.repair(path, EpisodeRecord)
    kept = count if cut >= len(whole) - 1 else count - 1
    assert tail.kept == kept
    assert path.read_bytes() == b"".join(lines[:kept])
    assert tail.torn == (b"" if kept == count else whole[len(b"".join(lines[:-1])) : cut])
    written(path, episode("next"))
    assert [record.task_id for record in records.read(path, EpisodeRecord)] == [*(f"e{n}" for n in range(kept)), "next"]


def test_c49_a_broken_line_in_the_middle_is_named_and_nothing_changes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = written(path, *(episode(f"e{n}") for n in range(3))).splitlines(keepends=True)
    broken = lines[0] + b'{"episode": "e4", "tok\n' + lines[2]
    path.write_bytes(broken)
    with pytest.raises(RecordError, match="line 2"):
        records.repair(path, EpisodeRecord)
    with pytest.raises(RecordError, match="line 2"):
        list(records.read(path, EpisodeRecord))
    assert path.read_bytes() == broken


def damaged(change: dict[str, Any]) -> bytes:
    """A line whose one branch has other fields."""
    record = json.loads(records.encode(episode()))
    record["branches"][0] |= change
    return json.dumps(record).encode() + b"\n"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"fork": {"branch": "other", "at": 1}}, "branch 'main' shares 1 ids that no branch before it has"),
        ({"fork": {"branch": "main", "at": 0}}, "branch 'main' shares 0 ids that no branch before it has"),
        ({"fork": {"branch": "other", "at": -1}}, "branch 'main' shares -1 ids that no branch before it has"),
        (
            {"turns": [{"start": 1, "end": 3, "seed": 0, "finish_reason": "stop"}]},
            "branch 'main' has 2 ids, and a turn that is not within them",
        ),
        ({"token_ids": [1, 2**31]}, "signed integer is greater than maximum"),
        ({"mask": [1, 128]}, "signed char is greater than maximum"),
    ],
)
def test_a_record_that_contradicts_itself_is_none(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(records.encode(episode()) + damaged(change))
    with pytest.raises(
        RecordError, match=f"line 2: not a record of ours: {why}.*without that line the rest can be read"
    ):
        list(records.read(path, EpisodeRecord))


def test_a_fork_of_more_ids_than_there_are_is_no_record() -> None:
    assert episode(branches=[branch(), branch("twin", fork=Fork("main", 2))])
    line = records.encode(episode(branches=[branch(), branch("twin", ids=())]))
    record = json.loads(line)
    record["branches"][1]["fork"] = {"branch": "main", "at": 3}
    with pytest.raises(msgspec.ValidationError, match="branch 'twin' shares 3 ids that no branch before it has"):
        records.decode(json.dumps(record).encode(), EpisodeRecord)


def test_a_line_that_is_nested_too_deeply_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    with pytest.raises(RecordError, match="line 1: not a record of ours: it is nested too deeply"):
        list(records.read(path, EpisodeRecord))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        list(records.read(tmp_path / "none.jsonl", EpisodeRecord))
    with pytest.raises(RecordError, match="cannot be opened for writing"):
        Appender[EpisodeRecord](tmp_path / "no" / "such" / "folder.jsonl")


def test_the_good_record_is_the_highest_attempt_that_is_ok() -> None:
    given = [
        episode("a", 0, 0), episode("a", 0, 2, reward=3.0), episode("a", 0, 1), episode("a", 0, 3, status="error"),
        episode("b", 1, 0, status="cancelled"),
    ]  # fmt: skip
    good = good_records(given)
    assert {key: record.reward for key, record in good.items()} == {("a", 0): 3.0}


def test_a_fork_is_joined_with_its_prefix() -> None:
    first = branch(ids=(1, 2, 3, 4))
    second = branch("b", (5, 6), Fork("main", 2))
    third = branch("c", (7,), Fork("b", 3))
    record = episode(branches=[first, second, third])
    assert list(joined(record, second).token_ids) == [1, 2, 5, 6]
    assert list(joined(record, third).token_ids) == [1, 2, 5, 7]


def test_a_turns_record_has_all_that_its_completion_says() -> None:
    kv = KVUsage(reprefilled_tokens=11, restored_tokens=12)
    completion = Completion(
        token_ids=Ids([5, 6]), logprobs=Floats([-1, -2]), versions=Ids([3, 4]), oldest_kv=2, finish_reason="stop",
        matched_stop=6, seed=7, context_tokens=40, cached_tokens=30, kv=kv, queue_seconds=0.1, prefill_seconds=0.2,
        decode_seconds=0.3, verifications=8, drafted_tokens=9, accepted_tokens=10, top_logprobs=[{5: -1.0}, {6: -2.0}],
    )  # fmt: skip
    assert msgspec.to_builtins(turn_record(completion)) == {
        "start": 40, "end": 42, "seed": 7, "finish_reason": "stop", "matched_stop": 6, "cached_tokens": 30,
        "queue_seconds": 0.1, "prefill_seconds": 0.2, "decode_seconds": 0.3, "verifications": 8, "drafted_tokens": 9,
        "accepted_tokens": 10, "oldest_kv": 2, "reprefilled_tokens": 11, "restored_tokens": 12,
        "top_logprobs": [{5: -1.0}, {6: -2.0}],
    }  # fmt: skip
