"""What a run leaves on disk: the schema of a record, and how a file of them is appended to, read and repaired.

`trajectories.jsonl` holds one line for each *attempt* of an episode, failures included. The file is append-only, strict
JSON (no NaN, no Infinity) in UTF-8, and only LF ends a record: characters such as U+2028 are ordinary inside strings. One
record is one `write`, so a crash leaves at most one torn line, and only at the end.
"""

import fcntl
import math
import os
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

import msgspec

from agentrt.core import json
from agentrt.core.errors import RecordError
from agentrt.core.protocol import Completion
from agentrt.core.tokens import Floats, Ids, Mask, Tokens

SCHEMA_VERSION = 1
MAIN = "main"
"""The branch of the agent that is given the task."""

T = TypeVar("T")
Status = Literal["ok", "error", "cancelled"]


class StopReason(StrEnum):
    """Why an episode ended."""

    COMPLETED = "completed"
    """A final answer, or the environment said so."""
    MAX_TURNS = "max_turns"
    TURN_LENGTH = "turn_length"
    """A turn was cut at `limits.max_turn_tokens`; a cut turn runs no tool."""
    EPISODE_TOKENS = "episode_tokens"
    CONTEXT_LENGTH = "context_length"
    """The next turn would not fit the model's context."""
    TOOL_CALLS = "tool_calls"
    NO_PROGRESS = "no_progress"
    WALL_TIME = "wall_time"
    ERROR = "error"
    CANCELLED = "cancelled"

    @property
    def is_truncated(self) -> bool:
        """True if a limit ended the episode rather than its own end."""
        return self not in (StopReason.COMPLETED, StopReason.ERROR, StopReason.CANCELLED)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Whose failure ended an attempt, and what was raised."""

    boundary: str
    type: str
    message: str
    traceback: str = ""


class Score(msgspec.Struct, frozen=True):
    """One named component of the reward; null if it could not be had."""

    score: float | None
    weight: float


class Fork(msgspec.Struct, frozen=True):
    """A branch that shares the first `at` ids of another one."""

    branch: str
    at: int


class Rewrite(msgspec.Struct, frozen=True):
    """A branch with a prompt of its own because the history of another one was rewritten, and how."""

    branch: str
    reason: str


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One model turn: the ids `[start, end)` of its branch (of the whole list, the forked prefix counted)."""

    start: int
    end: int
    seed: int
    finish_reason: str
    matched_stop: int | str | None = None
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    verifications: int = 0
    """Steps that verified a draft; `drafted_tokens` and `accepted_tokens` are the ids of those drafts, and what stood."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    oldest_kv: int | None = None
    """As in `Completion`, and the next two as in `KVUsage`."""
    reprefilled_tokens: int = 0
    restored_tokens: int = 0
    top_logprobs: list[dict[int, float]] = []
    """As in `Completion`, of the ids `[start, end)`; empty unless `sampling.top_logprobs` asked for them."""


class BranchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One linear token sequence, a row for the trainer. A fork stores its own suffix only."""

    name: str
    fork: Fork | None = None
    rewrite: Rewrite | None = None
    token_ids: Ids
    mask: Mask
    logprobs: Floats
    versions: Ids
    turns: list[TurnRecord] = []

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"branch {self.name!r}: token_ids, mask, logprobs and versions differ in length")


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call as it was dispatched, or refused."""

    branch: str = MAIN
    """Whose call it is."""
    turn: int
    """The turn of that branch that it came after, from 0 on; -1 for a call before the first."""
    name: str
    arguments: Any
    outcome: str
    """ok, or the reason it gave no result: unknown_tool, malformed, timeout, exit_nonzero, ..."""
    result: str
    seconds: float = 0.0
    queue_seconds: float = 0.0
    """It waited for a place among the calls that run; not in `seconds`."""
    truncated: bool = False
    total_bytes: int = 0
    decode_errors: int = 0
    isolation: str = ""
    """What was in force around it: `L3:mem=poll`."""


class EpisodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of one episode."""

    schema_version: int = SCHEMA_VERSION
    task_id: str
    member: int
    attempt: int
    seed: int
    status: Status
    error: Failure | None = None
    stop_reason: StopReason
    truncated: bool
    reward: float | None
    reward_reason: str | None = None
    """Why there is no reward."""
    rewards: dict[str, Score] = {}
    metrics: dict[str, float] = {}
    branches: list[BranchRecord] = []
    messages: list[dict[str, Any]] = []
    calls: list[CallRecord] = []
    timing: dict[str, Any] = {}
    kv: dict[str, float] = {}
    logprobs_of: str = "sampled_distribution"
    quantized: tuple[str, ...] = ()
    """As in `EngineInfo`."""

    def __post_init__(self) -> None:
        lengths: dict[str, int] = {}
        for branch in self.branches:
            shared = branch.fork.at if branch.fork else 0
            if branch.fork and not 0 <= shared <= lengths.get(branch.fork.branch, -1):
                raise ValueError(f"branch {branch.name!r} shares {shared} ids that no branch before it has")
            length = lengths[branch.name] = shared + len(branch.token_ids)
            if not all(0 <= turn.start <= turn.end <= length for turn in branch.turns):
                raise ValueError(f"branch {branch.name!r} has {length} ids, and a turn that is not within them")

    @property
    def key(self) -> tuple[str, int]:
        """Which episode this is an attempt of."""
        return self.task_id, self.member


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes of one task together; derived from the trajectories. Lists are in member order."""

    task_id: str
    members: int
    valid: int
    rewards: list[float | None]
    advantages: list[float | None]


class Tail(NamedTuple):
    """What `repair` found at the end of a file."""

    kept: int
    """Whole records."""
    torn: bytes
    """The bytes of a torn last record, now in `aside`."""
    aside: Path | None


def encode(record: Any) -> bytes:
    """One record as one line of strict JSON, LF included."""
    return msgspec.json.encode(record, enc_hook=_to_builtin) + b"\n"


def decode(line: bytes, kind: type[T]) -> T:
    """The record on one line; raises `msgspec.DecodeError` (or `ValidationError`)."""
    record: T = json.decode(line, kind, _from_builtin)
    return record


def read(path: Path, kind: type[T]) -> Iterator[T]:
    """The whole records of a file, one at a time. A torn last line is passed over; a broken one elsewhere raises."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield decode(line, kind)
            except msgspec.DecodeError as error:
                if not line.endswith(b"\n"):
                    return
                raise RecordError(
                    f"{path}, line {number}: not a record of ours: {error}; without that line the rest can be read"
                ) from error


def repair(path: Path, kind: type[Any]) -> Tail:
    """Make a file that a crash may have torn fit to append to.

    A torn last record is cut off and its bytes kept in `<path>.torn`; blank lines at the end go; a whole last record gets
    its LF. A broken line anywhere else raises `RecordError` with its number, and nothing is changed.
    """
    kept, end, start = 0, 0, 0
    torn, needs_newline, broken = b"", False, ""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            start += len(line)
            if not line.strip():
                continue
            if broken:
                raise RecordError(f"{broken}; nothing was changed; take the line out, and what it was runs again")
            try:
                decode(line, kind)
            except msgspec.DecodeError as error:
                torn, broken = line, f"{path}, line {number}: not a record of ours: {error}"
            else:
                kept, end, needs_newline = kept + 1, start, not line.endswith(b"\n")
    aside = _keep_aside(path, torn) if torn else None
    with path.open("r+b") as file:
        file.truncate(end)
        if needs_newline:
            file.seek(end)
            file.write(b"\n")
    return Tail(kept, torn, aside)


class Appender(Generic[T]):
    """Appends records to one file, one `write` each. A context manager; while it is open nobody else can have one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RecordError(f"{path}: cannot be opened for writing: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            why = "another process writes to it; wait for it or stop it"
            if not isinstance(error, BlockingIOError):
                why = f"cannot be locked: {error.strerror}; choose a folder on another file system"
            raise RecordError(f"{path}: {why}") from error

    def append(self, record: T) -> None:
        """Write one record; when this returns, the operating system has it. A full disk leaves no half record behind."""
        line = encode(record)
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(28, "No space left on device")
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise RecordError(
                f"{self.path}: cannot be written: {error.strerror}; the records before are whole: make room and go on"
            ) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def turn_record(completion: Completion) -> TurnRecord:
    """The record of a whole turn."""
    start, kv = completion.context_tokens, completion.kv
    return TurnRecord(
        start=start, end=start + len(completion.token_ids), seed=completion.seed,
        finish_reason=completion.finish_reason, matched_stop=completion.matched_stop,
        cached_tokens=completion.cached_tokens, queue_seconds=completion.queue_seconds,
        prefill_seconds=completion.prefill_seconds, decode_seconds=completion.decode_seconds,
        verifications=completion.verifications, drafted_tokens=completion.drafted_tokens,
        accepted_tokens=completion.accepted_tokens, oldest_kv=completion.oldest_kv,
        reprefilled_tokens=kv.reprefilled_tokens, restored_tokens=kv.restored_tokens,
        top_logprobs=completion.top_logprobs,
    )  # fmt: skip


def branch_record(
    name: str,
    tokens: Tokens,
    turns: Iterable[TurnRecord] = (),
    fork: Fork | None = None,
    rewrite: Rewrite | None = None,
) -> BranchRecord:
    """The record of a branch; of a fork, its own suffix."""
    own = tokens.copy(fork.at) if fork else tokens
    return BranchRecord(
        name=name, fork=fork, rewrite=rewrite, token_ids=own.token_ids, mask=own.mask, logprobs=own.logprobs,
        versions=own.versions, turns=list(turns),
    )  # fmt: skip


def text_of(value: object) -> str:
    """`str(value)` as a record can hold it. It is the user's, an error or a name: it may raise, or hold half a character."""
    try:
        text = str(value)
    except Exception as error:
        text = f"{type(value).__name__}, whose text cannot be had: {type(error).__name__}"
    return text.encode("utf-8", errors="replace").decode()


def joined(record: EpisodeRecord, branch: BranchRecord) -> Tokens:
    """The full arrays of a branch, with the prefix that it shares with the one it was forked from."""
    tokens = Tokens()
    if branch.fork is not None:
        parent = next(other for other in record.branches if branch.fork.branch == other.name)
        whole = joined(record, parent)
        for name in Tokens.__slots__:
            getattr(tokens, name).extend(getattr(whole, name)[: branch.fork.at])
    for name in Tokens.__slots__:
        getattr(tokens, name).extend(getattr(branch, name))
    return tokens


def good_records(records: Iterable[EpisodeRecord]) -> dict[tuple[str, int], EpisodeRecord]:
    """The good record of each episode: its highest attempt with status ok."""
    good: dict[tuple[str, int], EpisodeRecord] = {}
    for record in records:
        if record.status == "ok" and (record.key not in good or good[record.key].attempt < record.attempt):
            good[record.key] = record
    return good


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error


def _keep_aside(path: Path, torn: bytes) -> Path:
    aside = path.with_name(path.name + ".torn")
    with aside.open("ab") as file:
        file.write(torn if torn.endswith(b"\n") else torn + b"\n")
    return aside


def _to_builtin(value: Any) -> Any:
    if isinstance(value, Floats):
        # nine digits give a 32-bit float back exactly, in half the characters of its 64-bit repr
        return [float(f"{item:.9g}") for item in value]
    if isinstance(value, (Ids, Mask)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be stored in a record")


def _from_builtin(kind: type, value: Any) -> Any:
    if kind in (Ids, Mask, Floats):
        try:
            if kind is Floats and None in value:  # that is how JSON spells what is not finite
                value = [math.nan if item is None else item for item in value]
            return kind(value)
        except OverflowError as error:
            raise ValueError(str(error)) from error
    raise TypeError(f"{kind.__name__} cannot be read from a record")
