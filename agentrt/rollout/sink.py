"""`RunFolder`: where a run is kept, written so that a crash costs at most the episodes in flight.

`run.toml` comes first and holds the whole spec and all versions, so a folder that exists can be resumed. A record in
`trajectories.jsonl` counts as done when `write` returns: the operating system has it. `groups.jsonl` is derived. One
process writes to a folder at a time.
"""

import os
import shutil
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
from agentrt.core.spec import RunSpec, convert, load_toml, run_spec, to_toml

RUN, TRAJECTORIES, GROUPS = "run.toml", "trajectories.jsonl", "groups.jsonl"
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
    return StoredRun(run_spec(data.spec, f"{path / RUN}: spec"), data.versions)


def require_same(path: Path, stored: RunSpec, given: RunSpec) -> None:
    """`UsageError` naming what differs, if a run is to be resumed with another spec than its own."""
    differing = [name for name in RunSpec.__struct_fields__ if getattr(stored, name) != getattr(given, name)]
    if differing:
        raise UsageError(
            f"{path} was started with another {' and another '.join(differing)}; resume it with --resume {path} alone, "
            "or start a new run in another folder"
        )


def require_new(path: Path) -> None:
    """Raise `UsageError` if no run can begin at `path`, and `RecordError` if it cannot be written there."""
    try:
        if (path / RUN).exists():
            raise UsageError(f"{path} holds a run already; continue it with --resume, or choose another folder")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path} exists and is not a run of agentrt; choose another folder with -o")
    except OSError as error:
        raise _not_made(path, error.strerror) from error
    require_writable(path)


def require_writable(path: Path) -> None:
    """Raise `RecordError` if no folder can be made at `path`: now, for what is to be put there takes long."""
    place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise _not_made(path, f"{place} is no folder that can be written")


def _not_made(path: Path, why: str | None) -> RecordError:
    return RecordError(f"{path}: cannot be made: {why}; choose another with -o")


class RunFolder:
    """The files of one run. A context manager, open for writing inside its scope; made by `create` or `resume`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, spec: RunSpec, versions: Mapping[str, str]) -> "RunFolder":
        """A new folder with its `run.toml`. Raises as `require_new`."""
        require_new(path)
        text = tomli_w.dumps({"spec": to_toml(spec), "versions": dict(versions)})
        try:
            path.mkdir(parents=True, exist_ok=True)
            draft = path / f"{RUN}.new"
            draft.write_text(text, encoding="utf-8")
            draft.rename(path / RUN)
        except OSError as error:
            raise _not_made(path, error.strerror) from error
        return cls(path)

    @classmethod
    def resume(cls, path: Path) -> "RunFolder":
        """The folder of an earlier run."""
        stored_run(path)
        return cls(path)

    def remove_if_empty(self) -> None:
        """Remove a folder in which there is no record: what could not begin is in nobody's way when it is tried again."""
        if not (self.path / TRAJECTORIES).exists() or (self.path / TRAJECTORIES).stat().st_size == 0:
            shutil.rmtree(self.path, ignore_errors=True)  # there is an error already, and it is the one to see

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
            self._trajectories = opened.enter_context(trajectories_in(self.path))
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
def trajectories_in(folder: Path) -> Iterator[Appender[EpisodeRecord]]:
    """The trajectories of a folder, to append to; a torn last record, which a crash left, is cut off and kept aside."""
    with Appender[EpisodeRecord](folder / TRAJECTORIES) as file:
        _repair(file.path)
        yield file


def _repair(path: Path) -> None:
    try:
        tail = records.repair(path, EpisodeRecord)
    except RecordError:
        raise
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}") from error
    if tail.torn:
        line = tail.kept + 1
        log.warning("torn_record", file=str(path), line=line, bytes=len(tail.torn), kept_in=str(tail.aside))
