"""`agentrt doctor`: every line is there, and what is missing comes with how to get it."""

import json
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from agentrt.cli.doctor import EXTRAS, doctor

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_every_line_is_there_and_a_fix_beside_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_pyarrow(name: str) -> str:
        if name == "pyarrow":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(sys.modules["agentrt.cli.doctor"], "version", without_pyarrow)
    doctor(model="no-such-model", as_json=True)
    found = {line["about"] or line["found"]: line for line in json.loads(capsys.readouterr().out)}
    assert {"python", "packages", "processor", "gpu", "sandbox", "kernels", "environments"} <= found.keys()
    assert found["[parquet]"]["fix"] == "pip install 'agentrt[parquet]'"
    assert found["[gguf]"]["fix"] == ""
    assert found["model"]["fix"] == "agentrt pull smollm2-135m"
    assert "calculator" in found["environments"]["found"]


def test_every_optional_part_for_users_is_known() -> None:
    extras = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert EXTRAS.keys() == extras.keys() - {"test", "templates"}


def test_the_table_names_what_a_terminal_would_take_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    doctor(model="no-such-model", as_json=False)
    printed = capsys.readouterr().out
    assert "[gguf]" in printed
    assert "unknown model 'no-such-model'" in " ".join(printed.split())


def test_a_template_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    doctor(template="sprout")
    printed = capsys.readouterr().out
    assert "renderer   Sprout" in printed
    assert "«<tool_call>\n" in printed


def test_the_sandbox_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    doctor(sandbox=True)
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"isolation  L[23]:mem=", lines[0])
    assert "tried      files: read_secret, write_outside: enforced" in lines
    assert any(line.startswith("held for   memory: all processes") for line in lines)
    assert any(line.startswith("not more   ") for line in lines)
