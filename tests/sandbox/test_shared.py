"""Tools that serve all episodes of a run: one process, no episode's folder, nobody pays for what another episode did."""

import os
import sys
from pathlib import Path

import anyio
import pytest

import agentrt.sandbox.shared as shared
from agentrt.sandbox.launcher import Launcher
from agentrt.sandbox.level import Level
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox
from agentrt.sandbox.shared import SharedWorkers
from agentrt.sandbox.terms import Terms, ToolLimits

pytestmark = pytest.mark.anyio
SHARED = Terms(protocol="shared")
PROGRAM = """
import json, os, sys, time
serial = str(time.perf_counter_ns())
for line in sys.stdin:
    call = json.loads(line)
    time.sleep(call.get("wait", 0))
    if call.get("exit") == "before":
        os._exit(7)
    listed = [serial, os.getcwd(), os.listdir(".")]
    os.write(int(os.environ["AGENTRT_REPLY_FD"]), json.dumps({"result": json.dumps(listed)}).encode() + b"\\n")
    if call.get("exit") == "after":
        time.sleep(0.2)  # else its end may be seen with the reply
        os._exit(7)
"""


class Run:
    """The sandboxes of some episodes of one run."""

    def __init__(self, launcher: Launcher, places: int = 4) -> None:
        self.launcher, self.permits, self.workers = launcher, Permits(places), SharedWorkers()

    def sandbox(self) -> Sandbox:
        return Sandbox(self.permits, self.launcher, workers=self.workers)


async def call(sandbox: Sandbox, *, terms: Terms = SHARED, seconds: float = 20.0, **request: object) -> ToolResult:
    return await sandbox.call([sys.executable, "-I", "-S", "-c", PROGRAM], request, seconds=seconds, terms=terms)


async def serial(sandbox: Sandbox, **request: object) -> str:
    """Of the process that serves a call which must go well."""
    result = await call(sandbox, **request)  # type: ignore[arg-type]
    assert result.outcome == "ok", result
    return str(result.text.split(",")[0])


async def test_one_process_serves_all_episodes_and_sees_the_folder_of_none(launcher: Launcher) -> None:
    run = Run(launcher)
    with run.sandbox() as first:
        first.put({"mine": "x"})
        result = await call(first)
        assert result.text.endswith(", []]")
        if launcher.isolation.level is not Level.L3:  # there it is always /w
            assert os.fsencode(first.folder).decode() not in result.text
        with run.sandbox() as second, first.fork() as forked:
            serials = {await serial(each) for each in (first, second, forked)}
        assert serials == {await serial(first)} == {result.text.split(",")[0]}


async def test_the_last_sandbox_to_leave_ends_the_process(launcher: Launcher) -> None:
    run, before = Run(launcher), len(os.listdir("/proc/self/fd"))
    with run.sandbox() as first:
        with run.sandbox() as second:
            old = await serial(second)
        assert await serial(first) == old
    folders = [path for path in launcher.place.episodes.iterdir() if path.is_dir()]
    assert folders == []
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the zygote's socket, if this call was its first
    with run.sandbox() as third:
        assert await serial(third) != old


@pytest.mark.parametrize("processes", [1, 2])
async def test_calls_take_turns_of_as_many_processes_as_the_tool_may_have(launcher: Launcher, processes: int) -> None:
    run, terms = Run(launcher), Terms(protocol="shared", max_concurrency=processes)
    serials = list[str]()

    async def one(sandbox: Sandbox) -> None:
        serials.append(await serial(sandbox, terms=terms, wait=0.1))

    with run.sandbox() as first, run.sandbox() as second:
        async with anyio.create_task_group() as calls:
            for sandbox in (first, second, first, second):
                calls.start_soon(one, sandbox)
    assert len(serials) == 4
    assert len(set(serials)) == processes


async def test_without_a_number_it_is_one() -> None:
    assert [Terms(protocol="shared").places, Terms(protocol="shared", max_concurrency=3).places] == [1, 3]
    assert [Terms().places, Terms(protocol="worker", max_concurrency=2).places] == [None, 2]


async def test_a_process_has_a_number_of_calls(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "CALLS_OF_PROCESS", 2)
    with Run(launcher).sandbox() as sandbox:
        serials = [await serial(sandbox) for _ in range(5)]
    assert [serials.index(each) for each in serials] == [0, 0, 2, 2, 4]


async def test_what_one_episode_did_is_no_other_ones_failure(launcher: Launcher) -> None:
    run = Run(launcher)
    with run.sandbox() as bad, run.sandbox() as good:
        first = await serial(good)
        assert (await call(bad, exit="before")).outcome == "exit_nonzero"
        assert await serial(good) != first
        assert (await call(bad, wait=60, seconds=0.2)).outcome == "timeout"
        assert await serial(good) != first
        with anyio.move_on_after(0.2):
            await call(bad, wait=60)
        assert await serial(good) != first


@pytest.mark.parametrize("protocol", ["shared", "worker"])
async def test_a_process_that_ended_after_its_reply_is_replaced_at_the_next_call(
    launcher: Launcher, protocol: str
) -> None:
    with Run(launcher).sandbox() as sandbox:
        terms = Terms(protocol="worker" if protocol == "worker" else "shared")
        old = await serial(sandbox, terms=terms, exit="after")
        await anyio.sleep(0.6)
        assert await serial(sandbox, terms=terms) != old


async def test_a_limit_of_the_process_is_that_calls_outcome(launcher: Launcher) -> None:
    terms = Terms(protocol="shared", limits=ToolLimits(wall_seconds=0.2))
    with Run(launcher).sandbox() as sandbox:
        assert (await call(sandbox, terms=terms, wait=5)).outcome == "timeout"
        assert (await call(sandbox, terms=terms)).outcome == "ok"


async def test_the_calculator_is_one_process_of_a_run(launcher: Launcher) -> None:
    from agentrt.env.tool import tool

    calculator, run = tool("calculator"), Run(launcher)
    assert calculator.terms.protocol == "shared"
    with run.sandbox() as first, run.sandbox() as second:
        results = [
            await sandbox.call(calculator.argv, {"expression": text}, seconds=20, terms=calculator.terms)
            for sandbox, text in ((first, "2 * 3"), (second, "1 / 0"), (first, "7 - 9"))
        ]
    assert [(each.outcome, each.text) for each in results] == [
        ("ok", "6"), ("tool_error", "division by zero"), ("ok", "-2"),
    ]  # fmt: skip
    assert Path(calculator.argv[-1]).name == "calculator.py"
