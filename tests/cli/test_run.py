"""`agentrt run` as a user meets it: the real command, the shipped model, real tools."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrt.core.records import EpisodeRecord, joined, read

COMMAND = [sys.executable, "-m", "agentrt"]
SMALL = ["run", "calculator", "--groups", "3", "--group-size", "2", "--seed", "1"]


def agentrt(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=100, cwd=cwd)


def trajectories(folder: Path) -> list[EpisodeRecord]:
    return list(read(folder / "trajectories.jsonl", EpisodeRecord))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A whole run: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("run") / "out"
    done = agentrt(*SMALL, "-o", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_last_line_is_the_summary_as_json(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    result = json.loads(printed.splitlines()[-1])
    assert result["folder"] == str(folder)
    assert (result["attempts"], result["summary"]["good"], result["summary"]["failed"]) == (6, 6, 0)
    assert 0 <= result["summary"]["reward_mean"] <= 1
    assert "reward" in printed.splitlines()[2]


def test_the_folder_holds_spec_records_and_groups(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    assert {path.name for path in folder.iterdir()} == {"run.toml", "trajectories.jsonl", "groups.jsonl", "logs"}
    groups = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    assert [(group["members"], group["valid"]) for group in groups] == [(2, 2)] * 3
    for record in trajectories(folder):
        for branch in record.branches:
            sampled = [index for turn in branch.turns for index in range(turn.start, turn.end)]
            assert [index for index, bit in enumerate(branch.mask) if bit] == sampled
            assert all((version >= 0) == bool(bit) for version, bit in zip(branch.versions, branch.mask, strict=True))
            assert all(bit or logprob == 0.0 for logprob, bit in zip(branch.logprobs, branch.mask, strict=True))
            assert max(branch.logprobs) <= 0.0


def test_transformers_gives_the_recorded_logprobs(finished: tuple[Path, str]) -> None:
    """Re-scoring the ids from scratch, with another implementation of the model, within 1e-3."""
    import torch
    from transformers import AutoModelForCausalLM

    from agentrt.core.models import find_model

    model = AutoModelForCausalLM.from_pretrained(find_model("sprout"), dtype=torch.float32)
    for record in trajectories(finished[0]):
        tokens = joined(record, record.branches[0])
        ids = torch.tensor([tokens.token_ids.tolist()])
        with torch.no_grad():
            logprobs = model(ids).logits[0].double().log_softmax(-1)
        for index in range(1, len(tokens)):
            if tokens.mask[index]:
                expected = logprobs[index - 1, tokens.token_ids[index]].item()
                assert tokens.logprobs[index] == pytest.approx(expected, abs=1e-3)


def test_the_same_command_samples_the_same_ids_and_bits(finished: tuple[Path, str], tmp_path: Path) -> None:
    assert agentrt(*SMALL, "-o", str(tmp_path / "again"), "--set", "max_concurrent=1").returncode == 0
    first, second = (
        {record.key: record for record in trajectories(path)} for path in (finished[0], tmp_path / "again")
    )
    assert first.keys() == second.keys()
    for key, record in first.items():
        for name in ("token_ids", "mask", "logprobs", "versions"):
            assert getattr(record.branches[0], name) == getattr(second[key].branches[0], name)


def test_a_finished_run_has_nothing_left_to_resume(finished: tuple[Path, str]) -> None:
    before = (finished[0] / "trajectories.jsonl").read_bytes()
    again = agentrt("run", "--resume", str(finished[0]), "--json")
    assert again.returncode == 0
    assert "this run is complete" in again.stderr
    assert "not as it was" not in again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["attempts"] == 0
    assert (finished[0] / "trajectories.jsonl").read_bytes() == before


def test_a_resume_says_what_is_not_as_it_was(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(finished[0], folder)
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(re.sub(r'(?m)^(model|environment) = "[0-9a-f]{32,}"', r'\1 = "0"', text))
    again = agentrt("run", "--resume", str(folder))
    assert again.returncode == 0
    assert (
        "not as it was when this run began: model, environment; what is left is run with what is here now"
        in again.stderr
    )


def test_a_resume_with_another_spec_is_refused(finished: tuple[Path, str]) -> None:
    done = agentrt("run", "calculator", "--resume", str(finished[0]), "--seed", "2")
    assert done.returncode == 2
    assert "started with another" in done.stderr


def started(folder: Path, records: int) -> subprocess.Popen[str]:
    """A run that has at least `records` records by now, and is not done."""
    process = subprocess.Popen(
        [*COMMAND, "run", "calculator", "--groups", "30", "--group-size", "2", "--set", "max_concurrent=2", "-o", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 90
    file = folder / "trajectories.jsonl"
    while not (file.exists() and file.read_bytes().count(b"\n") >= records):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def test_c52_interrupted_then_resumed(tmp_path: Path) -> None:
    """SIGINT: exit 130, whole records, no tool left; the resume leaves one good record for each episode."""
    process = started(tmp_path / "out", records=4)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "go on with --resume" in errors
    assert not tools_of(process.pid)
    records = trajectories(tmp_path / "out")
    assert 4 <= len(records) < 60
    assert agentrt("run", "--resume", str(tmp_path / "out")).returncode == 0
    keys = [record.key for record in trajectories(tmp_path / "out") if record.status == "ok"]
    assert len(keys) == len(set(keys)) == 60


def test_killed_half_way_then_resumed(tmp_path: Path) -> None:
    """kill -9, with a torn line made worse: exactly one good record for each (task, member)."""
    process = started(tmp_path / "out", records=4)
    process.kill()
    process.communicate(timeout=60)
    with (tmp_path / "out" / "trajectories.jsonl").open("ab") as file:
        file.write(b'{"schema_version":1,"task_id":"trai')
    done = agentrt("run", "--resume", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    keys = [record.key for record in trajectories(tmp_path / "out") if record.status == "ok"]
    assert len(keys) == len(set(keys)) == 60


def tools_of(pid: int) -> list[str]:
    """Command lines of living processes that were started for a run of `pid`'s session or adopted from it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid or ("agentrt_tools" in line and parent == 1):
                found.append(line)
    return found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "no environment given"),
        (["run", "calculater"], "did you mean 'calculator'?"),
        (["run", "calculator", "--model", "sprot"], "unknown model 'sprot'; did you mean 'sprout'?"),
        (["run", "calculator", "--split", "evla"], "no split 'evla'; did you mean 'eval'?"),
        (["run", "calculator", "--set", "limits.max_turn=3"], "unknown key limits.max_turn; did you mean 'max_turns'?"),
        (["run", "calculator", "--set", "limits.max_turns=many"], "limits.max_turns"),
        (["run", "calculator", "--set", "nonsense"], "expected dotted.key=value"),
        (["run", "calculator", "--group-size", "0"], "group_size must be above 0"),
        (["run", "calculator", "--config", "none.toml"], "none.toml: no such file"),
        (["run", "--resume", "nowhere"], "not a run folder"),
        (["run", "no_such_file.py"], "no such file"),
        (["describe", "calculater"], "did you mean 'calculator'?"),
        (["rnu"], "No such command"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = agentrt(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_toml_error_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('environment = "calculator"\ngroups = \n')
    done = agentrt("run", "--config", "run.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "run.toml: not valid TOML" in done.stderr
    assert "line 2" in done.stderr


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    done = agentrt("run", "calculator", "-o", str(tmp_path))
    assert done.returncode == 2
    assert "is not a run of agentrt" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_environment_that_raises_shows_its_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import no_such_package\n")
    done = agentrt("run", "mine.py", cwd=tmp_path)
    assert done.returncode == 1
    assert f'File "{tmp_path}/mine.py", line 1' in done.stderr
    assert "typer" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == "agentrt: environment mine.py raised ModuleNotFoundError: No module named 'no_such_package'"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = agentrt("run", "calculator", "-o", str(tmp_path / "file" / "out"))
    assert done.returncode == 1
    assert "file/out: cannot be made: " in done.stderr
    assert "Traceback" not in done.stderr


BROKEN = """
from agentrt import Environment, Message, Task, reward

class Broken(Environment):
    '''An environment whose every step raises.'''
    async def tasks(self, split):
        yield Task("one", (Message("user", "hello"),))

    async def step(self, episode, turn):
        raise ValueError("bad state")

    @reward
    async def nothing(self, episode):
        return 0.0
"""


def test_an_environment_that_raises_makes_failed_records_and_exit_1(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = agentrt("run", "broken.py", "--groups", "1", "--group-size", "2", "-o", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "environment: ValueError: bad state" in done.stderr
    records = trajectories(tmp_path / "out")
    assert [record.status for record in records] == ["error", "error"]
    for record in records:
        assert record.error is not None
        assert (record.reward, record.error.type) == (None, "ValueError")
        assert "broken.py" in record.error.traceback
        assert record.branches[0].mask.count(1) > 0


def test_tasks_that_fail_leave_no_folder(tmp_path: Path) -> None:
    """An empty one was in the way of the same command, once the environment was repaired."""
    (tmp_path / "broken.py").write_text(BROKEN.replace("yield Task", "yield 1 / 0, Task"))
    done = agentrt("run", "broken.py", "-o", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "tasks('train') raised ZeroDivisionError" in done.stderr
    assert not (tmp_path / "out").exists()


def test_dry_run_prints_the_whole_spec_and_runs_nothing(tmp_path: Path) -> None:
    import tomllib

    done = agentrt("run", "calculator", "--dry-run", "--set", "sampling.temperature=0.5", cwd=tmp_path)
    assert done.returncode == 0
    spec = tomllib.loads(done.stdout)
    assert spec["sampling"]["temperature"] == 0.5
    assert (spec["groups"], spec["group_size"]) == (4, 4)
    assert list(tmp_path.iterdir()) == []
