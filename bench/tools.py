"""What a tool call costs: latency, throughput, spawning from a large runtime, and how long the event loop stands still.

    python bench/tools.py

At the strongest level that works here, and at the next one where that is another. `python` is one call of the shipped
tool, code compiled and run; `exec` is a new interpreter; `numpy` has it imported already; `session` is a call of a worker
that lives on. Run it on an idle machine: the scheduler's ticks of a busy one double every figure.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio

from agentrt import tool
from agentrt.core.errors import SandboxFailure
from agentrt.env.tool import Tool
from agentrt.sandbox.launcher import Launcher, make_place
from agentrt.sandbox.level import Level
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.probe import strongest
from agentrt.sandbox.sandbox import Sandbox
from agentrt.sandbox.terms import DEFAULT_TERMS

CALLS, IN_FLIGHT = 200, 16
BALLAST = 4 << 30
TICK = 0.001
Call = Callable[[], Awaitable[Any]]


def quantiles(seconds: list[float]) -> str:
    """Median and 95th percentile, in ms."""
    cuts = statistics.quantiles(seconds, n=20)
    return f"{statistics.median(seconds) * 1e3:7.2f} {cuts[18] * 1e3:7.2f}"


async def latency(call: Call, calls: int = CALLS) -> str:
    """One call after the other."""
    for _ in range(5):
        await call()
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - started)
    return quantiles(seconds)


async def throughput(call: Call) -> tuple[float, float]:
    """Calls a second of `IN_FLIGHT` callers, and the longest time that the loop stood still meanwhile."""
    stall, each = 0.0, CALLS * 5 // 2 // IN_FLIGHT

    async def caller() -> None:
        for _ in range(each):
            await call()

    async def tick() -> None:
        nonlocal stall
        while True:
            started = time.perf_counter()
            await anyio.sleep(TICK)
            stall = max(stall, time.perf_counter() - started - TICK)

    async with anyio.create_task_group() as ticking:
        ticking.start_soon(tick)
        started = time.perf_counter()
        async with anyio.create_task_group() as calls:
            for _ in range(IN_FLIGHT):
                calls.start_soon(caller)
        rate = each * IN_FLIGHT / (time.perf_counter() - started)
        ticking.cancel_scope.cancel()
    return rate, stall


async def measure(launcher: Launcher, numpy: Tool) -> None:
    """All figures of one level."""
    python, session, shared = tool("python"), tool("repl"), tool("calculator")
    interpreter = [sys.executable, "-I", "-S", "-c", "pass"]
    with Sandbox(Permits(IN_FLIGHT), launcher) as sandbox:

        def calling(each: Tool, code: str) -> Call:
            return lambda: sandbox.call(each.argv, {"code": code}, seconds=20, terms=each.terms)

        cases: dict[str, Call] = {
            "python": calling(python, "print(1 + 1)"),
            "/bin/true": lambda: sandbox.call(["/bin/true"], {}, seconds=20, terms=DEFAULT_TERMS),
            "exec": lambda: sandbox.call(interpreter, {}, seconds=20, terms=DEFAULT_TERMS),
            "numpy": calling(numpy, ""),
            "session": calling(session, "1 + 1"),
            "shared": lambda: sandbox.call(shared.argv, {"expression": "1 + 1"}, seconds=20, terms=shared.terms),
        }
        for name, call in cases.items():
            print(f"{launcher.isolation.code:12} {name:12} {await latency(call)} ms median, p95", flush=True)
        for name in ("python", "shared"):
            rate, stall = await throughput(cases[name])
            print(
                f"{launcher.isolation.code:12} {name:12} {IN_FLIGHT} in flight {rate:7.0f} calls/s, loop stalls "
                f"{stall * 1e3:.1f} ms"
            )
        ballast = bytearray(BALLAST)
        ballast[:: os.sysconf("SC_PAGE_SIZE")] = b"x" * (BALLAST // os.sysconf("SC_PAGE_SIZE"))
        print(f"{launcher.isolation.code:12} {'4 GiB more':12} {await latency(cases['python'])} ms median, p95")


@contextmanager
def numpy_tool() -> Iterator[Tool]:
    """A tool of one's own that finds numpy imported."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "sum.py")
        program.write_text("import numpy\nprint(numpy.arange(10).sum())\n")
        program.with_suffix(".toml").write_text(
            'name = "sum"\ndescription = "d"\nimports = ["numpy"]\n[parameters]\ntype = "object"\n'
        )
        yield tool(program)


def main() -> None:
    """Print a row for each case."""
    place = make_place()
    with numpy_tool() as numpy:
        for level in (Level.L3, Level.L2):
            try:
                launcher = strongest(place, (level,))
            except SandboxFailure as error:
                print(error)
                continue
            with closing(launcher):
                anyio.run(measure, launcher, numpy)


if __name__ == "__main__":
    main()
