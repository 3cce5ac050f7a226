"""`agentrt eval` as a user meets it: intervals, a folder of its own, and held-out tasks only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "agentrt"]


def agentrt(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=100, cwd=cwd)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A whole evaluation: where it was started, and what it printed."""
    place = tmp_path_factory.mktemp("eval")
    done = agentrt("eval", "calculator", "--groups", "4", "--group-size", "2", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    return place, done


def test_it_prints_estimates_and_pass_at_k(evaluated: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    printed = evaluated[1].stdout
    result = json.loads(printed.splitlines()[-1])
    found = result["evaluation"]
    assert (found["tasks"], found["episodes"], found["scored"]) == (4, 8, 8)
    assert set(found["pass_at"]) == {"1", "2"}
    assert found["pass_at"]["1"]["mean"] == pytest.approx(found["reward"]["mean"])
    assert found["reward"]["tasks"] == 4
    assert "pass@2" in printed
    assert "intervals: 95%" in printed


def test_its_folder_is_its_own(evaluated: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    place, _ = evaluated
    (folder,) = (place / "outputs").iterdir()
    assert folder.name.startswith("eval-calculator-2")
    records = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
    assert all(record["task_id"].startswith("eval-") for record in records)
    done = agentrt("run", "--resume", str(folder), cwd=place)
    assert done.returncode == 2
    assert "was made by `agentrt eval`; resume it with that" in done.stderr


def test_training_tasks_are_no_evaluation(tmp_path: Path) -> None:
    done = agentrt("eval", "calculator", "--split", "train", cwd=tmp_path)
    assert done.returncode == 2
    assert "an evaluation takes held-out tasks" in done.stderr
    assert list(tmp_path.iterdir()) == []
