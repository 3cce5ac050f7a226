"""`RunFolder`: where a run is kept, written so that a crash costs at most the episodes in flight.

`run.toml` comes first and holds the whole spec and all versions, so a folder that exists can be resumed. A record in
`trajectories.jsonl` counts as done when `write` returns: the operating system has it. `groups.jsonl` is derived. One
process writes to a folder at a time.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import structlog
import tomli_w

from agentrt.core import records
from agentrt.core.errors import RecordError, UsageError
from agentrt.core.records import Appender, EpisodeRecord, GroupRecord
from agentrt.core.spec import RunSpec, convert, load_toml

RUN, TRAJECTORIES, GROUPS = "run.toml", "trajectories.jsonl", "groups.jsonl"
UNBOUNDED = "unbounded"
"""How run.toml spells a limit of None, for which TOML has no word."""

log = structlog.get_logger(__name__)


class _RunFile(msgspec.Struct, forbid_unknown_fields=True):
    spec: dict[str, Any]
    versions: dict[str, str]


class StoredRun(NamedTuple):
    """What `run.toml` holds."""

    spec: RunSpec
    versions: dict[str, str]


def stored_run(path: Path) -> StoredRun:
    """Read the `run.toml` of a folder; `UsageError` if it is not one of ours."""
    if not (path / RUN).is_file():
        raise UsageError(f"{path}: not a run folder (it has no {RUN}); give the folder of an earlier run")
    data = convert(load_toml(path / RUN), _RunFile, str(path / RUN))
    spec, limits = data.spec, data.spec.get("limits", {})
    if isinstance(limits, dict):
        spec["limits"] = {key: None if value == UNBOUNDED else value for key, value in limits.items()}
    return StoredRun(convert(spec, RunSpec, f"{path / RUN}: spec"), data.versions)


def require_same(path: Path, stored: RunSpec, given: RunSpec) -> None:
    """`UsageError` naming what differs, if a run is to be resumed with another spec than its own."""
    differing = [name for name in RunSpec.__struct_fields__ if getattr(stored, name) != getattr(given, name)]
    if differing:
        raise UsageError(
            f"{path} was started with another {' and another '.join(differing)}; resume it with --resume {path} alone, "
            "or start a new run in another folder"
        )


class RunFolder:
    """The files of one run. A context manager, open for writing inside its scope; made by `create` or `resume`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, spec: RunSpec, versions: Mapping[str, str]) -> "RunFolder":
        """A new folder with its `run.toml`. Refuses one that exists and is not empty."""
        text = tomli_w.dumps({"spec": _storable(spec), "versions": dict(versions)})
        try:
            if (path / RUN).exists():
                raise UsageError(f"{path} holds a run already; continue it with --resume, or choose another folder")
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise UsageError(f"{path} exists and is not a run of agentrt; choose another folder with -o")
            path.mkdir(parents=True, exist_ok=True)
            draft = path / f"{RUN}.new"
            draft.write_text(text, encoding="utf-8")
            draft.rename(path / RUN)
        except OSError as error:
            raise RecordError(f"{path}: no run can be kept here: {error.strerror}; choose another with -o") from error
        return cls(path)

    @classmethod
    def resume(cls, path: Path) -> "RunFolder":
        """The folder of an earlier run."""
        stored_run(path)
        return cls(path)

    def trajectories(self) -> Iterable[EpisodeRecord]:
        """The records so far, one at a time."""
        path = self.path / TRAJECTORIES
        return records.read(path, EpisodeRecord) if path.exists() else ()

    def groups(self) -> Iterable[GroupRecord]:
        """The groups that have ended."""
        path = self.path / GROUPS
        return records.read(path, GroupRecord) if path.exists() else ()

    def rewrite_groups(self, groups: Iterable[GroupRecord]) -> None:
        """Replace what `groups.jsonl` holds; it is derived from the trajectories."""
        os.truncate(self.path / GROUPS, 0)
        for group in groups:
            self._groups.append(group)

    def write(self, record: EpisodeRecord) -> None:
        """Append one attempt. `RecordError` if it cannot be (a full disk); the records before it stay whole."""
        self._trajectories.append(record)

    def write_group(self, group: GroupRecord) -> None:
        """Append one group."""
        self._groups.append(group)

    def __enter__(self) -> Self:
        """Open the files; a torn last record, which a crash left, is cut off and kept aside."""
        with ExitStack() as opened:
            opened.enter_context(_locked(self.path))
            _repair(self.path / TRAJECTORIES)
            self._trajectories = opened.enter_context(Appender[EpisodeRecord](self.path / TRAJECTORIES))
            self._groups = opened.enter_context(Appender[GroupRecord](self.path / GROUPS))
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


class Held:
    """A sink in memory."""

    def __init__(self) -> None:
        self.episodes: list[EpisodeRecord] = []

    def write(self, record: EpisodeRecord) -> None:
        """Keep a record."""
        self.episodes.append(record)

    def write_group(self, group: GroupRecord) -> None:
        """Nothing: a group follows from its records."""


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a run, which is on its `run.toml`."""
    with (path / RUN).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RecordError(f"{path}: another process writes to this run; wait for it or stop it") from error
        yield


def _repair(path: Path) -> None:
    if not path.exists():
        return
    try:
        tail = records.repair(path, EpisodeRecord)
    except RecordError:
        raise
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}") from error
    if tail.torn:
        line = tail.kept + 1
        log.warning("torn_record", file=str(path), line=line, bytes=len(tail.torn), kept_in=str(tail.aside))


def spec_toml(spec: RunSpec) -> str:
    """A spec as the TOML that `run.toml` holds it in."""
    return tomli_w.dumps(_storable(spec))


def _storable(spec: RunSpec) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(spec, str_keys=True)
    data["limits"] = {key: UNBOUNDED if value is None else value for key, value in data["limits"].items()}
    return data
