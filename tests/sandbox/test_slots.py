"""Warm slots: made ready before a call, used for one, replaced, bounded in number."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from agentrt.sandbox.launcher import Launcher
from agentrt.sandbox.level import Level
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox
from agentrt.sandbox.zygote import WARM_SLOTS, Kind, Zygote


def children(pid: int) -> list[int]:
    try:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except OSError:
        return []


def slots(launcher: Launcher, zygote: Zygote) -> list[int]:
    """The supervisors that a zygote has forked; with namespaces it has a process before itself."""
    if launcher.isolation.level is Level.L3:
        return [slot for first in children(zygote.pid) for slot in children(first)]
    return children(zygote.pid)


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def run(launcher: Launcher, *scripts: str, at_once: bool = False) -> list[ToolResult]:
    async def main() -> list[ToolResult]:
        results = [ToolResult(outcome="infra", text="never run")] * len(scripts)

        async def one(index: int) -> None:
            results[index] = await sandbox.call(["/bin/sh", "-c", scripts[index]], {}, seconds=20)

        with Sandbox(Permits(len(scripts)), launcher) as sandbox:
            async with anyio.create_task_group() as group:
                for index in range(len(scripts)):
                    if at_once:
                        group.start_soon(one, index)
                    else:
                        await one(index)
        return results

    return anyio.run(main)


def test_they_are_as_many_as_said_and_made_anew_for_each_call(launcher: Launcher) -> None:
    zygote = launcher.zygote(Kind())
    wait_for(lambda: len(slots(launcher, zygote)) == WARM_SLOTS)
    before = slots(launcher, zygote)
    results = run(launcher, *["echo x"] * 20, at_once=True)
    assert [result.text for result in results] == ["x\n"] * 20
    wait_for(lambda: len(slots(launcher, zygote)) == WARM_SLOTS)
    assert not set(before) & set(slots(launcher, zygote))
    # A supervisor is there a moment before its payload.
    wait_for(lambda: [len(children(slot)) for slot in slots(launcher, zygote)] == [1] * WARM_SLOTS)


def test_a_call_finds_nothing_of_the_one_before(launcher: Launcher) -> None:
    leaving = "echo left > $TMPDIR/left; setsid sleep 3700 & cd /tmp; umask 0; echo $$"
    looking = "cat $TMPDIR/left; ls /dev/shm; ps ax | grep 370[0]; umask; pwd"
    if launcher.isolation.level is not Level.L3:
        leaving, looking = (
            leaving.replace("$TMPDIR", "/tmp"),
            looking.replace("$TMPDIR", "/tmp").replace("ls /dev/shm;", ""),
        )
    for result in run(launcher, leaving, looking, leaving, looking)[1::2]:
        *_, mask, folder = result.text.splitlines()
        assert "left" not in result.text.replace("cat:", "")
        assert "3700" not in result.text
        assert (mask, os.path.basename(folder)) != ("0000", "tmp")


def test_one_that_dies_as_it_waits_is_replaced(launcher: Launcher) -> None:
    zygote = launcher.zygote(Kind())
    wait_for(lambda: len(slots(launcher, zygote)) == WARM_SLOTS)
    before = slots(launcher, zygote)
    for slot in before:
        os.kill(slot, signal.SIGKILL)
    wait_for(lambda: not set(before) & set(slots(launcher, zygote)))
    assert [result.text for result in run(launcher, "echo x", "echo y")] == ["x\n", "y\n"]
    wait_for(lambda: len(slots(launcher, zygote)) == WARM_SLOTS)


def test_calls_that_wait_for_a_slot_outlast_their_zygotes_recycling(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrt.sandbox.launcher.RECYCLE_AFTER", 10)
    first = launcher.zygote(Kind())
    results = run(launcher, *["sleep 0.05; echo x"] * 24, at_once=True)
    assert [result.text for result in results] == ["x\n"] * 24
    assert launcher.zygote(Kind()) is not first
    wait_for(lambda: first.has_ended)
