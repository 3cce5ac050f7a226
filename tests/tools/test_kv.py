"""The key-value store as the runtime runs it: a subprocess whose working directory is the episode's."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import agentrt_tools.kv as program


def run(folder: Path, **call: Any) -> Any:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(Path(program.__file__))],
        input=json.dumps(call) + "\n", capture_output=True, text=True, env={}, cwd=folder, timeout=30, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_set_get_list_delete(tmp_path: Path) -> None:
    assert run(tmp_path, op="set", key="b", value="zwei") == {"result": "ok"}
    assert run(tmp_path, op="set", key="a", value="é\n") == {"result": "ok"}
    assert run(tmp_path, op="list") == {"result": "a\nb"}
    assert run(tmp_path, op="get", key="a") == {"result": "é\n"}
    assert run(tmp_path, op="delete", key="a") == {"result": "ok"}
    assert run(tmp_path, op="list") == {"result": "b"}


def test_what_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, op="get", key="a") == {"error": "there is no key 'a'"}
    assert run(tmp_path, op="delete", key="a") == {"error": "there is no key 'a'"}
    assert run(tmp_path, op="get") == {"error": "key is missing or no text"}
    assert run(tmp_path, op="set", key="a", value=5) == {"error": "value is missing or no text"}
    assert run(tmp_path, op="drop") == {"error": "op is one of set, get, delete, list"}
    assert run(tmp_path, op="set", key="a", value="x" * 1_000_000) == {
        "error": "the store would be larger than 1000000 bytes"
    }
    assert run(tmp_path, op="list") == {"result": ""}


def test_calls_side_by_side_lose_nothing(tmp_path: Path) -> None:
    keys = [f"k{index}" for index in range(12)]
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda key: run(tmp_path, op="set", key=key, value=key), keys))
    assert replies == [{"result": "ok"}] * 12
    assert run(tmp_path, op="list") == {"result": "\n".join(sorted(keys))}
