"""`agentrt serve` as a process: what it refuses, and that it answers, records and ends in order."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from agentrt.cli import app
from agentrt.cli.engines import api_key
from agentrt.core.errors import UsageError
from agentrt.core.records import EpisodeRecord, read
from agentrt.core.spec import EngineSpec

COMMAND = (sys.executable, "-m", "agentrt", "serve")


def test_another_host_needs_a_key() -> None:
    done = subprocess.run([*COMMAND, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--api-keys" in done.stderr


def test_keys_are_ascii(tmp_path: Path) -> None:
    """A header holds nothing else. A file in another encoding was a traceback."""
    file = tmp_path / "keys"
    file.write_bytes("clé".encode("latin-1"))
    done = CliRunner().invoke(app, ["serve", "--api-keys", str(file)])
    assert str(done.exception).startswith(f"{file}: holds no keys, which are ASCII")
    with pytest.raises(UsageError, match="holds no key, which is ASCII"):
        api_key(EngineSpec(api_key_file=str(file)))


def test_a_port_is_one() -> None:
    done = subprocess.run([*COMMAND, "--port", "65536"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def served(*options: str) -> Iterator[str]:
    """The URL of a server of sprout, which ends in order."""
    command = [*COMMAND, "sprout", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+", line)))
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0


@pytest.mark.timeout(400)
def test_sprout_is_served_and_its_sessions_recorded(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 16, "return_token_ids": True}
    with served("-o", str(tmp_path), "--seed", "1") as url:
        reply = httpx.post(f"{url}/sessions/one/v1/chat/completions", json=body, timeout=300).json()
    [record] = read(tmp_path / "trajectories.jsonl", EpisodeRecord)
    [branch] = record.branches
    assert branch.token_ids.tolist() == [*reply["prompt_token_ids"], *reply["choices"][0]["token_ids"]]
    assert record.task_id == "one"


@pytest.mark.timeout(900)
def test_a_run_over_two_engines_gives_the_ids_of_a_run_over_one(tmp_path: Path) -> None:
    """Sampled ids, logprobs to the bit, versions and rewards; neither engine is left behind."""
    run = [sys.executable, "-m", "agentrt", "run", "calculator", "--groups", "2", "--group-size", "2", "-o"]
    two = subprocess.run(
        [*run, str(tmp_path / "two"), "--set", "engine.engines=2"],
        check=True,
        timeout=400,
        capture_output=True,
        text=True,
    )
    subprocess.run([*run, str(tmp_path / "one")], check=True, timeout=400)
    one_run, two_run = (
        {
            record.key: ([msgspec.structs.replace(branch, turns=[]) for branch in record.branches], record.reward)
            for record in read(tmp_path / name / "trajectories.jsonl", EpisodeRecord)
        }
        for name in ("one", "two")
    )
    assert len(one_run) == 4
    assert two_run == one_run
    urls = [line.split(": agentrt, sprout, ")[0] for line in two.stderr.splitlines() if ": agentrt, sprout, " in line]
    assert len(urls) == 2
    for url in urls:
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)


def test_an_engine_of_a_run_that_was_killed_ends_by_itself(tmp_path: Path) -> None:
    """The pipe to its standard input ends with the process that holds it."""
    code = (
        "import sys, time; from agentrt.engine.remote.spawn import spawned; from agentrt.core.spec import EngineSpec\n"
    )
    code += "with spawned('sprout', EngineSpec(), 'k') as urls: print(urls[0], flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        assert httpx.get(f"{url}/health", timeout=100).status_code == 200
        owner.kill()
    for _ in range(100):
        try:
            httpx.get(f"{url}/health", timeout=100)
        except httpx.TransportError:
            return
        time.sleep(0.1)
    pytest.fail("it runs on")
