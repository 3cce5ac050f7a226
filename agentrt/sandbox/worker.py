"""`Worker`: a tool whose process lives as long as the episode: one JSON line in and one back, again and again.

The contract is that of `agentrt.sandbox.channel`, but standard input does not end: the next line on it is the next call,
and the tool's reply ends a call. Calls of one worker take turns. A worker that has ended, by itself, by a limit or with a
cancelled call, has lost its state; the next call starts another one. `agentrt.sandbox.mcp` speaks another protocol over
the same life.
"""

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from agentrt.core import clock
from agentrt.sandbox.channel import answered, result
from agentrt.sandbox.inside.job import Job
from agentrt.sandbox.process import Process
from agentrt.sandbox.reply import Progress, Said
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.terms import ToolLimits
from agentrt.sandbox.zygote import Zygote


class Worker:
    """A context manager; leaving it ends the process. `start` makes what a call needs: the zygote and the job.

    After `max_calls` a process ends, and the next call starts another one.
    """

    def __init__(
        self, start: Callable[[], tuple[Zygote, Job]], limits: ToolLimits, max_calls: float = math.inf
    ) -> None:
        self._start, self._limits, self._max_calls = start, limits, max_calls
        self._calls = 0
        """That the process has had."""
        self._turn = anyio.Lock()
        self._process: Process | None = None
        self._refusal = ""
        """Why the process cannot be used, though it has started."""
        self._is_broken = False
        """It runs, and is of no use for another call."""
        self._on_progress: Callable[[Progress], None] | None = None

    async def call(
        self, request: Any, *, seconds: float, on_progress: Callable[[Progress], None] | None = None
    ) -> ToolResult:
        """One call. Always gives a result, except for cancellation, which passes after the process has ended."""
        clock.refuse_in_virtual_time("a tool's process")
        async with self._turn:
            self._on_progress = on_progress
            try:
                if self._process is not None:
                    self._process.forget()
                    if self._process.has_ended():
                        await self._end()
                process = self._process or await self._started()
                if process.status is None and self._refusal:
                    await self._end()
                    return ToolResult(outcome="infra", text=self._refusal)
                started = clock.now()
                with anyio.move_on_after(seconds) as limit:
                    await self._ask(process, request)
                is_over = process.status is not None or limit.cancelled_caught
            except BaseException:
                await self._end()
                raise
            elapsed = clock.now() - started
            if is_over:
                await self._end()
                return result(process, self._said(process), is_late=limit.cancelled_caught, seconds=elapsed)
            process.drain()
            said = self._said(process)
            self._calls += 1
            if self._is_broken or self._calls >= self._max_calls:
                await self._end()
            return answered(process, said, said.outcome if said else "ok", code=None, seconds=elapsed)

    async def _started(self) -> Process:
        zygote, job = self._start()
        with ExitStack() as stack:
            process = stack.enter_context(
                Process(self._limits.output_bytes, self._limits.reply_bytes, self._hear_progress, self._take_stdout())
            )
            stdin, self._stdin = os.pipe()
            stack.callback(os.close, self._stdin)
            os.set_blocking(self._stdin, False)
            self._process, self._scope, self._calls = process, stack.pop_all(), 0
        await process.start(zygote, job, stdin, self._limits.start_seconds)
        if process.status is not None:
            return process
        with anyio.move_on_after(self._limits.start_seconds) as limit:
            self._refusal = await self._greet(process)
        if limit.cancelled_caught:
            self._refusal = f"it was not ready within {self._limits.start_seconds:g} s"
        return process

    def _take_stdout(self) -> Callable[[bytes], None] | None:
        """What takes a new process's standard output; None: it is kept, as the text of a call that replies nothing."""
        return None

    async def _greet(self, process: Process) -> str:
        """Whatever comes before the first call, not charged to it; why that did not work."""
        return ""

    def _said(self, process: Process) -> Said | None:
        """The answer to what was asked."""
        return process.reply.said()

    def _hear_progress(self, progress: Progress) -> None:
        if self._on_progress is not None:
            self._on_progress(progress)

    async def _ask(self, process: Process, request: Any) -> None:
        left = self._write(msgspec.json.encode(request) + b"\n")
        if not left:  # the usual case needs no task group
            await process.read_until(lambda: process.reply.has_line)
            return
        async with anyio.create_task_group() as both:
            both.start_soon(self._write_all, left)
            await process.read_until(lambda: process.reply.has_line)
            both.cancel_scope.cancel()

    async def _write_all(self, data: bytes) -> None:
        while data:
            await anyio.wait_writable(self._stdin)
            data = self._write(data)

    def _write(self, data: bytes) -> bytes:
        """Write what the pipe takes; what is left of it, nothing if the tool does not read any more."""
        try:
            return data[os.write(self._stdin, data) :]
        except BlockingIOError:
            return data
        except BrokenPipeError:
            return b""

    async def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            with self._scope:
                await process.tear_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            with self._scope:
                process.end()
