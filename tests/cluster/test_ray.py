"""`agentrt run --ray` on a cluster of two nodes on this machine, by Ray's own test utilities."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agentrt.core.records import EpisodeRecord, read

ray_cluster = pytest.importorskip("ray.cluster_utils")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

MARK = "AGENTRT_TEST_CLUSTER"
RUN = [sys.executable, "-m", "agentrt", "run", "calculator", "--groups", "6", "--group-size", "2", "-o"]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(MARK, str(os.getpid()))  # the processes of this cluster are known by it
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = ray_cluster.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


def workers() -> list[int]:
    """The processes of this cluster's workers."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            is_worker = (folder / "cmdline").read_bytes().startswith(b"ray::Worker")
            is_ours = f"{MARK}={os.getpid()}\0".encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if is_worker and is_ours:
            found.append(int(folder.name))
    return found


def results(folder: Path) -> dict[tuple[str, int], object]:
    records = list(read(folder / "trajectories.jsonl", EpisodeRecord))
    assert len({record.key for record in records}) == len(records), "an episode was recorded twice"
    return {
        record.key: ([msgspec.structs.replace(branch, turns=[]) for branch in record.branches], record.reward)
        for record in records
    }


def test_a_killed_worker_costs_no_episode_and_the_ids_are_those_of_one_process(address: str, tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    options = ["--ray", address, "--set", "engine.engines=2", "--set", "max_concurrent=4"]
    with subprocess.Popen([*RUN, str(there), *options], stderr=subprocess.PIPE, text=True) as run:
        file, deadline = there / "trajectories.jsonl", time.monotonic() + 300
        while not (file.exists() and file.read_bytes().count(b"\n")):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        pids = workers()
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        said = run.communicate(timeout=300)[1]
        assert run.returncode == 0, said
    assert "2 workers, one a node, over 2 engines" in said
    subprocess.run([*RUN, str(here)], check=True, timeout=300)
    assert len(results(here)) == 12
    assert results(there) == results(here)
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:7]))
    resumed = [*RUN[:4], "--resume", str(there), "--ray", address, "--json"]
    done = subprocess.run(resumed, check=True, timeout=300, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1])["attempts"] == 5
    assert results(there) == results(here)
