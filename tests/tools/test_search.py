"""The search program: what it finds, in which order, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentrt_tools.search as program
from agentrt_tools.search import SearchError, answer, best

PEOPLE = ("Ann: friend Bob, town Keb.", "Bob: friend Cid, town Lor.", "Cid: friend Ann, town Mun.")


def run(folder: Path, line: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(Path(program.__file__))],
        input=line, capture_output=True, text=True, env={}, cwd=folder, timeout=30, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "entry"), [*zip(("Ann", "bob", "CID"), PEOPLE, strict=True)])
def test_a_title_comes_before_a_mention(name: str, entry: str) -> None:
    assert best(name, PEOPLE, 1) == [entry]
    assert len(best(name, PEOPLE, 5)) == 2


def test_more_words_come_first_and_equal_scores_keep_their_order() -> None:
    lines = ("the red boat", "a boat", "the red sea", "a boat")
    assert best("red boat", lines, 4) == ["the red boat", "the red sea", "a boat", "a boat"]
    assert best("ship", lines, 4) == []


def test_as_the_runtime_runs_it(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "people.txt").write_text("\n".join(PEOPLE))
    (tmp_path / "a.md").write_text("# Towns\n\nKeb lies by the sea.\n")
    (tmp_path / "c.json").write_text("Keb Keb Keb")
    (tmp_path / "d.txt").symlink_to("/etc/passwd")
    assert run(tmp_path, '{"query": "Bob"}\n') == {"result": PEOPLE[1]}
    assert run(tmp_path, '{"query": "keb", "limit": 9}') == {"result": f"Keb lies by the sea.\n{PEOPLE[0]}"}
    assert run(tmp_path, '{"query": "root"}') == {"result": "nothing found"}
    assert "expected one JSON line" in run(tmp_path, "[]")["error"]
    assert "expected one JSON line" in run(tmp_path, "")["error"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({}, "query is missing or has no word"), ({"query": "?!"}, "has no word"), ({"query": 3}, "has no word"),
        ({"query": "a", "limit": 0}, "from 1 to 20"), ({"query": "a", "limit": "2"}, "from 1 to 20"),
        ({"query": "a"}, "there are no documents"),
    ],
)  # fmt: skip
def test_what_is_refused(call: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=words):
        answer(call, str(tmp_path))


def test_too_much_to_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MAX_CHARACTERS", 10)
    (tmp_path / "a.txt").write_text("0123456789")
    assert answer({"query": "0123456789"}, str(tmp_path)) == "0123456789"
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(SearchError, match="longer than 10 characters"):
        answer({"query": "x"}, str(tmp_path))
