"""Records as tables: one row for each branch of an episode, ready for a trainer.

The arrays of a row are parallel and whole: a forked branch has the ids that it shares with its origin before its own.
Those are context there, not sampled again: their mask is 0, so that no token is trained on twice. Messages are those of
the main branch; the ids of the others are all there is of them. An advantage is over the good records of the group, once
it has ended: where a task was rolled out again and again, these are not those of any one line of `groups.jsonl`.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from agentrt.core.errors import RecordError, UsageError
from agentrt.core.records import MAIN, BranchRecord, EpisodeRecord
from agentrt.rollout.batch import row_of
from agentrt.rollout.group import advantages
from agentrt.rollout.resume import Ledger
from agentrt.rollout.sink import RunFolder

ROWS_A_BATCH = 256


def rows(folder: RunFolder, *, with_failures: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of the good record of each episode; with failures, of every attempt. Holds one record at a time."""
    good = Ledger(folder.trajectories())
    of_groups = {
        task_id: advantages([good.seen(task_id, member).reward for member in range(members)])
        for task_id, members in {group.task_id: group.members for group in folder.groups()}.items()
    }
    for record in folder.trajectories():
        is_good = good.seen(*record.key).good_attempt == record.attempt
        if is_good or with_failures:
            given = of_groups.get(record.task_id, [])
            advantage = given[record.member] if is_good and record.member < len(given) else None
            for branch in record.branches:
                yield _row(record, branch, advantage)


def to_parquet(source: Path, target: Path, *, with_failures: bool = False) -> int:
    """Write the rows of a run folder to one Parquet file; how many. The file is there only when it is whole.

    `UsageError` without pyarrow, `RecordError` if the records cannot be read or the file not be written.
    """
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise UsageError("writing Parquet needs the package pyarrow: pip install 'agentrt[parquet]'") from None
    table = rows(RunFolder.resume(source), with_failures=with_failures)
    draft, count = target.with_name(f".{target.name}.new"), 0
    try:
        with pyarrow.parquet.ParquetWriter(draft, schema()) as writer:
            while batch := list(islice(table, ROWS_A_BATCH)):
                writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema()))
                count += len(batch)
        draft.replace(target)
    except RecordError:  # an OSError too, of the records that are read
        raise
    except OSError as error:
        raise RecordError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            draft.unlink()
    return count


def schema() -> Any:
    """The columns. Ids and versions are int32, the mask int8, logprobs float32, as in memory."""
    import pyarrow as pa

    def table(**fields: Any) -> Any:
        return pa.list_(pa.struct(list(fields.items())))

    text, number, whole = pa.string(), pa.float64(), pa.int64()
    return pa.schema(
        {
            "task_id": text, "member": pa.int32(), "attempt": pa.int32(), "branch": text, "seed": whole,
            "status": text, "stop_reason": text, "truncated": pa.bool_(), "error": text,
            "reward": number, "reward_reason": text, "advantage": number,
            "rewards": table(name=text, score=number, weight=number), "metrics": table(name=text, value=number),
            "token_ids": pa.list_(pa.int32()), "mask": pa.list_(pa.int8()), "logprobs": pa.list_(pa.float32()),
            "versions": pa.list_(pa.int32()),
            "turns": table(start=pa.int32(), end=pa.int32(), seed=whole, finish_reason=text, cached_tokens=pa.int32()),
            "messages": table(role=text, content=text, reasoning=text, calls=text, name=text),
            "calls": table(turn=pa.int32(), name=text, arguments=text, outcome=text, result=text, seconds=number),
            "logprobs_of": text,
        }
    )  # fmt: skip


def _row(record: EpisodeRecord, branch: BranchRecord, advantage: float | None) -> dict[str, Any]:
    row = row_of(record, branch, advantage)
    return {
        "task_id": record.task_id, "member": record.member, "attempt": record.attempt, "branch": branch.name,
        "seed": record.seed, "status": record.status, "stop_reason": record.stop_reason.value,
        "truncated": record.truncated, "error": record.error and f"{record.error.type}: {record.error.message}",
        "reward": record.reward, "reward_reason": record.reward_reason, "advantage": advantage,
        "rewards": [
            {"name": name, "score": part.score, "weight": part.weight} for name, part in record.rewards.items()
        ],
        "metrics": [{"name": name, "value": value} for name, value in record.metrics.items()],
        "token_ids": row.token_ids, "mask": row.mask, "logprobs": row.logprobs, "versions": row.versions,
        "turns": [msgspec.to_builtins(turn) for turn in branch.turns],
        "messages": [_flat(message) for message in record.messages] if branch.name == MAIN else [],
        "calls": [
            {"turn": call.turn, "name": call.name, "arguments": _json(call.arguments), "outcome": call.outcome,
             "result": call.result, "seconds": call.seconds} for call in record.calls if call.branch == branch.name
        ],
        "logprobs_of": record.logprobs_of,
    }  # fmt: skip


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its calls as JSON text: their arguments have no common type."""
    return {**message, "calls": _json(message["calls"])} if message.get("calls") else dict(message)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
