"""Names of models: shipped, pulled, a path, the hub; each refusal says what to do."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrt.core.errors import FetchError, UsageError
from agentrt.core.models import cache_folder, find_model, known_models


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_pulled_model_is_found_by_name_and_a_folder_by_its_path(home: Path) -> None:
    pulled = made(cache_folder() / "smollm2-135m")
    assert find_model("smollm2-135m") == pulled
    assert find_model(str(made(home / "org" / "name"))) == home / "org" / "name"
    assert find_model("org/name") == Path("org/name")
    assert "smollm2-135m" in known_models()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2-135m", "not here yet; fetch it once with `agentrt pull smollm2-135m`"),
        ("smolm2-135m", "unknown model 'smolm2-135m'; did you mean 'smollm2-135m'?"),
        ("folder", "the folder has no config.json"),
        ("./sprot", "unknown model './sprot'; did you mean 'sprout'? (a folder or org/name works too)"),
        ("../models/mine", "unknown model '../models/mine'"),
    ],
)
def test_what_is_not_there(name: str, words: str, home: Path) -> None:
    (home / "folder").mkdir()
    with pytest.raises(UsageError) as caught:
        find_model(name)
    assert words in str(caught.value)


def test_the_hub_needs_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install 'agentrt\[hub\]'"):
        find_model("org/name")


def test_a_model_from_the_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/none":
            raise ConnectionError("no route\nmore")
        return str(home)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    assert find_model("org/name") == home
    assert asked == [("org/name", ["*.json", "*.safetensors", "*.jinja"])]
    with pytest.raises(FetchError, match=r"^model org/none cannot be fetched from the Hugging Face hub: no route$"):
        find_model("org/none")
