"""Warm slots: made ready before a call, used for one, replaced, bounded in number."""

import os
import signal
import socket
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest

from agentrt.env.tool import tool
from agentrt.sandbox.inside import supervisor
from agentrt.sandbox.inside.job import Ready, Setup
from agentrt.sandbox.launcher import Launcher
from agentrt.sandbox.level import Level
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox
from agentrt.sandbox.terms import DEFAULT_TERMS, Terms, ToolLimits
from agentrt.sandbox.zygote import KEPT_SLOTS, WARM_SLOTS, Kind, Place, Zygote


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


def run(launcher: Launcher, *scripts: str, at_once: bool = False, terms: Terms = DEFAULT_TERMS) -> list[ToolResult]:
    async def main() -> list[ToolResult]:
        results = [ToolResult(outcome="infra", text="never run")] * len(scripts)

        async def one(index: int) -> None:
            results[index] = await sandbox.call(["/bin/sh", "-c", scripts[index]], {}, seconds=20, terms=terms)

        with Sandbox(Permits(len(scripts)), launcher) as sandbox:
            async with anyio.create_task_group() as group:
                for index in range(len(scripts)):
                    if at_once:
                        group.start_soon(one, index)
                    else:
                        await one(index)
        return results

    return anyio.run(main)


def test_they_are_as_many_as_said_and_each_has_a_new_payload(launcher: Launcher) -> None:
    zygote = launcher.zygote(Kind(readable=("/usr/bin",)))
    wait_for(lambda: len(slots(launcher, zygote)) == WARM_SLOTS)
    before = [child for slot in slots(launcher, zygote) for child in children(slot)]
    terms = Terms(readable=("/usr/bin",))
    scripts = ["sleep 0.1; echo x"] * (KEPT_SLOTS + 8)
    assert [result.text for result in run(launcher, *scripts, at_once=True, terms=terms)] == ["x\n"] * len(scripts)
    # More were needed, and only as many as may be are kept. A supervisor is there a moment before its payload.
    wait_for(lambda: {len(children(slot)) for slot in slots(launcher, zygote)} == {1})
    assert WARM_SLOTS < len(slots(launcher, zygote)) <= KEPT_SLOTS + WARM_SLOTS
    assert not set(before) & {child for slot in slots(launcher, zygote) for child in children(slot)}


def test_a_kept_slot_serves_one_call_after_the_other(launcher: Launcher) -> None:
    """With the same process numbers each time, where there are namespaces: nobody sees how many calls there were."""
    zygote = launcher.zygote(Kind())
    wait_for(lambda: len(slots(launcher, zygote)) >= WARM_SLOTS)
    before = slots(launcher, zygote)
    results = run(launcher, *["/bin/true; echo $$ $PPID"] * 30)
    assert set(before) & set(slots(launcher, zygote))
    if launcher.isolation.level is Level.L3:
        assert {result.text for result in results} == {"2 1\n"}


def test_a_call_finds_nothing_of_the_one_before(launcher: Launcher) -> None:
    leaving = "echo left > $TMPDIR/left; setsid sleep 3700 & cd /tmp; umask 0; echo $$"
    looking = "cat $TMPDIR/left; ls /dev/shm; ps ax | grep 370[0]; umask; pwd"
    if launcher.isolation.level is not Level.L3:
        leaving, looking = (
            leaving.replace("$TMPDIR", "/tmp"),
            looking.replace("$TMPDIR", "/tmp").replace("ls /dev/shm;", ""),
        )
    for result in run(launcher, *[leaving, looking] * 2 * WARM_SLOTS)[1::2]:
        *_, mask, folder = result.text.splitlines()
        assert "left" not in result.text.replace("cat:", "")
        assert "3700" not in result.text
        assert (mask, os.path.basename(folder)) != ("0000", "tmp")


SCAN = """
import re
wanted, found = (b"mark[-]of[-]another", b"mark[-]of[-]own"), []  # not the words themselves, which would be found here
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    ranges = [line.split()[0].split("-") for line in maps if " rw" in line]
    for mark in wanted:
        for start, end in ranges:
            memory.seek(int(start, 16))
            if re.search(mark, memory.read(int(end, 16) - int(start, 16))):
                found.append(mark)
                break
found
"""


def test_no_memory_of_a_call_reaches_the_next(launcher: Launcher) -> None:
    """Not of its arguments, nor of its environment: a payload is forked from what has never seen a job."""
    if launcher.isolation.level is not Level.L3:
        pytest.skip("without namespaces a tool cannot read its own memory through /proc, which this test needs")
    python = tool("python")

    async def call(name: str, code: str) -> str:
        terms = msgspec.structs.replace(python.terms, environment={"MARK": f"mark-of-{name}"})
        argv = (*python.argv, f"mark-of-{name}")
        return (await sandbox.call(argv, {"code": code}, seconds=20, terms=terms)).text

    async def main() -> list[str]:
        for _ in range(4 * WARM_SLOTS):
            await call("another", "1")
        return [await call("own", SCAN) for _ in range(2 * WARM_SLOTS)]

    with Sandbox(Permits(1), launcher) as sandbox:
        assert {*anyio.run(main)} == {"[b'mark[-]of[-]own']\n"}


def test_one_that_dies_as_it_waits_is_replaced(launcher: Launcher) -> None:
    zygote = launcher.zygote(Kind())
    wait_for(lambda: len(slots(launcher, zygote)) >= WARM_SLOTS)
    before = slots(launcher, zygote)
    for slot in before:
        os.kill(slot, signal.SIGKILL)
    wait_for(lambda: not set(before) & set(slots(launcher, zygote)))
    assert [result.text for result in run(launcher, "echo x", "echo y")] == ["x\n", "y\n"]
    wait_for(lambda: len(slots(launcher, zygote)) >= WARM_SLOTS)


def test_calls_that_wait_for_a_slot_outlast_their_zygotes_recycling(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrt.sandbox.launcher.RECYCLE_AFTER", 10)
    first = launcher.zygote(Kind())
    results = run(launcher, *["sleep 0.05; echo x"] * 24, at_once=True)
    assert [result.text for result in results] == ["x\n"] * 24
    assert launcher.zygote(Kind()) is not first
    wait_for(lambda: first.has_ended)


def test_a_slot_is_idle_before_its_next_payload_can_take_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it the other way round, a slot that has a job could pass for an idle one, and jobs would wait for it."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    heard: list[bytes] = []

    class Ended(Exception): ...

    def fork(*_: object) -> tuple[int, socket.socket]:
        try:
            heard.append(os.read(reading, 100))
        except BlockingIOError:
            heard.append(b"")
        return 0, socket.socket()

    def end(code: int) -> None:
        raise Ended

    with monkeypatch.context() as patch:
        for name, fake in (("_enter", lambda *_: (0, 0)), ("_serve", lambda *_: None), ("_fork_payload", fork)):
            patch.setattr(supervisor, name, fake)
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setattr(os, "_exit", end)
        with socket.socket() as control, pytest.raises(Ended):
            supervisor.run(SETUP, Ready(False, 0, 0, b"", {}), control, writing, 3)
    os.close(reading)
    os.close(writing)
    assert heard == [b"", supervisor.IDLE, supervisor.IDLE]


SETUP = Setup(
    namespaces=False, landlock=0, seccomp=False, uid=0, root="", episodes="", readable=[], paths=[], imports=[], warm=1,
    kept=1, has_port=False,
)  # fmt: skip


@pytest.fixture
def slow_terms(place: Place, monkeypatch: pytest.MonkeyPatch) -> Terms:
    """Of calls whose zygote takes a second to be ready, and of which a dozen are all that are on their way at one time."""
    folder = place.scratch / "packages"
    folder.mkdir(exist_ok=True)
    (folder / "slow_to_import.py").write_text("import time; time.sleep(1)")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: dict.fromkeys(("purelib", "platlib"), str(folder)))
    return Terms(imports=("slow_to_import",), environment={"LONG": "x" * 16_000})


def test_more_calls_than_a_zygote_takes_wait_for_it(launcher: Launcher, slow_terms: Terms) -> None:
    terms = msgspec.structs.replace(slow_terms, readable=("/usr/share",))  # a zygote of its own
    results = run(launcher, *["echo x"] * 40, at_once=True, terms=terms)
    assert [(result.outcome, result.text) for result in results] == [("ok", "x\n")] * 40


def test_waiting_for_a_zygote_has_an_end(launcher: Launcher, slow_terms: Terms) -> None:
    terms = msgspec.structs.replace(slow_terms, limits=ToolLimits(start_seconds=0.2), readable=("/usr/lib",))
    results = run(launcher, *["echo x"] * 40, at_once=True, terms=terms)
    assert {(result.outcome, result.text) for result in results} == {("infra", "it did not start within 0.2 s")}
