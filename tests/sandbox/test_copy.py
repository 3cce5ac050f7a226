"""Copies of folders that hostile code has filled."""

import os
import stat
from pathlib import Path

import pytest

from agentrt.sandbox.copy import MAX_DEPTH, copy


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    return source, target


def test_files_folders_modes_and_links(folders: tuple[Path, Path]) -> None:
    source, target = folders
    (source / "in").mkdir()
    (source / "in" / "run").write_bytes(b"x" * 100_000)
    (source / "in" / "run").chmod(0o4755)
    (source / "in").chmod(0o750)
    os.symlink("/etc/passwd", source / "passwords")
    os.symlink("/", source / "up")
    copy(source, target)
    assert sorted(os.listdir(target)) == ["in", "passwords", "up"]
    assert (target / "in" / "run").read_bytes() == b"x" * 100_000
    assert stat.S_IMODE((target / "in" / "run").stat().st_mode) == 0o755  # no setuid
    assert stat.S_IMODE((target / "in").stat().st_mode) == 0o750
    assert (os.readlink(target / "passwords"), os.readlink(target / "up")) == ("/etc/passwd", "/")


def test_holes_stay_holes(folders: tuple[Path, Path]) -> None:
    source, target = folders
    with open(source / "sparse", "wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 30)
        file.write(b"data")
    copy(source, target)
    found = (target / "sparse").stat()
    assert (found.st_size, found.st_blocks * 512 <= 1 << 20) == (1 << 40, True)
    with open(target / "sparse", "rb") as file:
        file.seek((1 << 30) - 1)
        assert file.read(6) == b"\0data\0"


def test_pipes_and_what_lies_too_deep_are_left_out(folders: tuple[Path, Path]) -> None:
    source, target = folders
    os.mkfifo(source / "pipe")
    deep = source.joinpath(*["d"] * (MAX_DEPTH + 10))
    deep.mkdir(parents=True)
    copy(source, target)
    assert os.listdir(target) == ["d"]
    assert sum(1 for _ in os.walk(target)) == MAX_DEPTH + 1


def test_a_folder_that_is_a_link_now_leads_nowhere(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = folders
    (source / "in").mkdir()
    looked = os.stat

    def swapping(name: str, **options: object) -> os.stat_result:
        found = looked(name, **options)  # type: ignore[arg-type] # passed on as they are
        (source / "in").rmdir()
        os.symlink("/etc", source / "in")
        return found

    monkeypatch.setattr("agentrt.sandbox.copy.os.stat", swapping)
    copy(source, target)
    monkeypatch.undo()
    assert os.listdir(target) == []
