"""Nothing outlives a call, an episode or the runtime."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import anyio
import pytest

from agentrt.sandbox.copy import copy
from agentrt.sandbox.launcher import RECYCLE_AFTER, Launcher
from agentrt.sandbox.level import Level
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox
from agentrt.sandbox.terms import Protocol, Terms
from agentrt.sandbox.zygote import Kind

SLEEP = "sleep 3601 & setsid sh -c 'sleep 3602 & sleep 3603' & trap '' TERM; sleep 3604"


def alive(marker: str) -> list[str]:
    """Processes with an argument `marker`, anywhere on the machine."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(folder.name)
        except OSError:
            continue
    return found


def of_ours() -> dict[str, int]:
    """What a leak would add to."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mounts": Path("/proc/self/mountinfo").read_text().count("\n"),
        "children": sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children")),
    }


async def shell(sandbox: Sandbox, script: str, seconds: float = 20) -> ToolResult:
    return await sandbox.call(["/bin/sh", "-c", script], {}, seconds=seconds)


def test_five_hundred_calls_leak_nothing(launcher: Launcher) -> None:
    async def main() -> None:
        with Sandbox(Permits(16), launcher) as sandbox:
            await shell(sandbox, "true")
            before = of_ours()
            async with anyio.create_task_group() as calls:
                for _ in range(500):
                    calls.start_soon(shell, sandbox, "setsid sleep 3600 & :")
            assert of_ours() == before
            assert os.listdir(sandbox.folder) == []
        assert os.listdir(launcher.place.episodes) == []

    anyio.run(main)
    assert alive("3600") == []


def test_two_hundred_episodes_cancelled_at_any_point_leave_nothing(launcher: Launcher) -> None:
    """While they wait, while a call starts or runs or is torn down: two seconds later, there is nothing."""
    draw = random.Random(0)

    async def episode() -> None:
        async with running:
            with anyio.move_on_after(draw.uniform(0, 0.1)), Sandbox(permits, launcher) as sandbox:
                await shell(sandbox, SLEEP)

    async def main() -> None:
        async with anyio.create_task_group() as episodes:
            for _ in range(200):
                episodes.start_soon(episode)

    running, permits = anyio.CapacityLimiter(12), Permits(8)
    anyio.run(main)
    _wait_for(lambda: not any(alive(marker) for marker in ("3601", "3602", "3603", "3604")))
    assert os.listdir(launcher.place.episodes) == []


RUNTIME = """
import anyio, sys
from agentrt.sandbox.launcher import make_place
from agentrt.sandbox.level import Level
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.probe import strongest
from agentrt.sandbox.sandbox import Sandbox

async def main():
    place = make_place()
    with Sandbox(Permits(4), strongest(place, (Level(int(sys.argv[1])),))) as sandbox:
        print(place.scratch, flush=True)
        await sandbox.call(["/bin/sh", "-c", sys.argv[2]], {}, seconds=60)
anyio.run(main)
"""


def test_a_runtime_that_is_killed_leaves_nothing(launcher: Launcher) -> None:
    script = SLEEP.replace("360", "365")
    level = str(int(launcher.isolation.level))
    with subprocess.Popen([sys.executable, "-c", RUNTIME, level, script], stdout=subprocess.PIPE, text=True) as runtime:
        assert runtime.stdout is not None
        scratch = Path(runtime.stdout.readline().strip())
        _wait_for(lambda: len(alive("3653")) == 1)
        runtime.send_signal(signal.SIGKILL)
    _wait_for(lambda: not any(alive(f"365{last}") for last in "1234"))
    _wait_for(lambda: not alive(str(scratch)))
    assert scratch.exists()
    subprocess.run(
        [sys.executable, "-c", "from agentrt.sandbox.launcher import sweep; sweep()"], check=True, timeout=20
    )
    assert not scratch.exists()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _wait_for(condition: object, seconds: float = 2.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_zygote_that_dies_is_replaced(launcher: Launcher) -> None:
    async def main() -> None:
        with Sandbox(Permits(4), launcher) as sandbox:
            await shell(sandbox, "true")
            launcher.zygote(Kind()).kill()
            assert (await shell(sandbox, "echo again")).text == "again\n"
            zygote = launcher.zygote(Kind())
            os.kill(zygote.pid, signal.SIGKILL)
            _wait_for(lambda: _state(zygote.pid) == "Z")  # its calls end with it; nobody has looked at it yet
            assert (await shell(sandbox, "echo more")).text == "more\n"

    anyio.run(main)


def test_with_a_zygote_its_calls_die_and_it_is_not_their_fault(launcher: Launcher) -> None:
    if launcher.isolation.level is not Level.L3:
        pytest.skip("a zygote without namespaces is not above its calls: they go on")

    async def main() -> None:
        with Sandbox(Permits(4), launcher) as sandbox, anyio.fail_after(10):
            async with anyio.create_task_group() as calls:
                calls.start_soon(call, sandbox)
                await anyio.sleep(0.3)
                launcher.zygote(Kind()).kill()

    async def call(sandbox: Sandbox) -> None:
        results.append(await shell(sandbox, "echo part; sleep 3605"))

    results: list[ToolResult] = []
    anyio.run(main)
    assert [result.outcome for result in results] == ["infra"]
    _wait_for(lambda: not alive("3605"))  # the kernel ends the members of a namespace after its first process


def test_a_zygote_is_recycled(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrt.sandbox.launcher.RECYCLE_AFTER", 2)
    kind = Kind(readable=("/usr/bin",))
    first = launcher.zygote(kind)
    assert launcher.zygote(kind) is first
    assert launcher.zygote(kind) is not first
    assert RECYCLE_AFTER > 2


def test_an_episodes_folder_is_removed_whatever_is_in_it(launcher: Launcher) -> None:
    script = (
        "mkdir -p a/b/c; chmod 0 a/b; mkfifo pipe; ln -s / up; touch -- '-rf'; "
        "python3 -c \"import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\""
    )

    async def main() -> None:
        with Sandbox(Permits(1), launcher) as sandbox:
            folder = sandbox.folder
            await shell(sandbox, script)
            assert (folder / "up").is_symlink()
        assert not folder.exists()

    anyio.run(main)
    assert os.listdir(launcher.place.episodes) == []
    assert Path("/usr").exists()


def test_a_fork_starts_with_a_copy_and_goes_its_own_way(launcher: Launcher) -> None:
    async def main() -> None:
        with Sandbox(Permits(4), launcher) as first:
            await shell(first, "mkdir in; echo old > in/a; chmod 640 in/a")
            with first.fork() as second, second.fork() as third, first.fork() as unused:
                await shell(first, "echo new > in/a; touch b")
                assert (await shell(third, "stat -c %a in/a; cat in/a; echo own > in/a")).text == "640\nold\n"
                assert (await shell(second, "cat in/a; ls; echo more > c")).text == "old\nin\n"
                folders = [each.folder for each in (first, second, third, unused)]
            assert (await shell(first, "cat in/a; ls")).text == "new\nb\nin\n"
        assert not any(folder.exists() for folder in folders)

    anyio.run(main)


def test_calls_of_a_fork_side_by_side_all_wait_for_its_copy(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(source: Path, target: Path) -> None:
        time.sleep(0.3)
        copy(source, target)

    monkeypatch.setattr("agentrt.sandbox.sandbox.copy", slow)
    found: list[str] = []

    async def main() -> None:
        async def look(sandbox: Sandbox, script: str) -> None:
            found.append((await shell(sandbox, script)).text)

        with Sandbox(Permits(4), launcher) as first:
            await shell(first, "echo old > a")
            with first.fork() as second:
                async with anyio.create_task_group() as group:
                    for each, script in ((second, "cat a"), (second, "cat a"), (first, "echo new > a; cat a")):
                        group.start_soon(look, each, script)
                        await anyio.sleep(0.1)  # the copy is under way

    anyio.run(main)
    assert sorted(found) == ["new\n", "old\n", "old\n"]


def test_the_copy_for_a_fork_is_made_though_who_waited_for_it_was_cancelled(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        with Sandbox(Permits(4), launcher) as first:
            await shell(first, "echo old > a")
            with first.fork() as second:
                with anyio.CancelScope() as scope, monkeypatch.context() as patch:

                    async def cancelled(*_: object) -> None:
                        scope.cancel()
                        await anyio.lowlevel.checkpoint()

                    patch.setattr(anyio.to_thread, "run_sync", cancelled)
                    await shell(first, "echo new > a")
                assert scope.cancelled_caught
                assert (await shell(second, "cat a")).text == "old\n"

    anyio.run(main)


def test_a_copy_for_which_there_is_no_room_is_no_fork_with_fewer_files(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main() -> None:
        with Sandbox(Permits(4), launcher) as first:
            await shell(first, "echo old > a")
            with first.fork() as second, monkeypatch.context() as patch:
                patch.setattr(os, "sendfile", full)
                result = await shell(second, "cat a")
                assert (result.outcome, "no room for the call: [Errno 28] No space" in result.text) == ("infra", True)

    anyio.run(main)


@pytest.mark.parametrize("protocol", ["oneshot", "worker", "shared"])
def test_no_process_and_no_descriptor_are_infra(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, protocol: Protocol
) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    async def main() -> None:
        argv, terms = ["/bin/sh", "-c", 'read line; echo \'{"result": "here"}\' >&3'], Terms(protocol=protocol)
        with Sandbox(Permits(4), launcher) as sandbox:
            for place in (subprocess, "Popen"), (os, "pipe"):
                with monkeypatch.context() as patch:
                    patch.setattr(launcher, "_zygotes", {})
                    patch.setattr(*place, full)
                    result = await sandbox.call(argv, {}, seconds=20, terms=terms)
                    assert (result.outcome, "Resource temporarily" in result.text) == ("infra", True)
            assert (await sandbox.call(argv, {}, seconds=20, terms=terms)).text == "here"

    before = of_ours()["descriptors"]
    anyio.run(main)
    assert of_ours()["descriptors"] <= before + 1  # the zygote's, which stays
