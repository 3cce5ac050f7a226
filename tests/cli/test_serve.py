"""`agentrt serve` as a process: what it refuses, and that it answers, records and ends in order."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

COMMAND = (sys.executable, "-m", "agentrt.cli", "serve")


def test_another_host_needs_a_key() -> None:
    done = subprocess.run([*COMMAND, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--api-keys" in done.stderr


@pytest.mark.timeout(240)
def test_sprout_is_served_and_its_sessions_recorded(tmp_path: Path) -> None:
    command = [*COMMAND, "sprout", "--port", "0", "-o", str(tmp_path), "--seed", "1"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as server:
        try:
            assert server.stderr is not None
            url = next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+", line)))
            body = {
                "messages": [{"role": "user", "content": "What is 12 + 30?"}],
                "max_tokens": 16,
                "return_token_ids": True,
            }
            reply = httpx.post(f"{url}/sessions/one/v1/chat/completions", json=body, timeout=60).json()
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    [line] = (tmp_path / "trajectories.jsonl").read_text().splitlines()
    record = json.loads(line)
    [branch] = record["branches"]
    assert branch["token_ids"] == [*reply["prompt_token_ids"], *reply["choices"][0]["token_ids"]]
    assert record["task_id"] == "one"
