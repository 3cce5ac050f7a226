"""`Sandbox`: where one episode's tools run. Owns the episode's folder: made on entering, removed on leaving."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from agentrt.core.errors import UsageError
from agentrt.sandbox import channel
from agentrt.sandbox.copy import copy
from agentrt.sandbox.files import put
from agentrt.sandbox.inside.job import Job
from agentrt.sandbox.launcher import Launcher
from agentrt.sandbox.level import Isolation, Level
from agentrt.sandbox.permits import Permit, Permits
from agentrt.sandbox.probe import shared
from agentrt.sandbox.relay import Address
from agentrt.sandbox.reply import Progress
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.shared import SharedWorkers
from agentrt.sandbox.terms import DEFAULT_TERMS, Terms
from agentrt.sandbox.worker import Worker
from agentrt.sandbox.zygote import Kind, Zygote


class Sandbox:
    """A context manager. `permits` bounds the processes of a run; waiting for one is not charged to the tool.

    Without a `launcher`, that of this process, at the strongest level that works here. `workers` are those of shared tools;
    without them, it has its own.
    """

    def __init__(
        self,
        permits: Permits,
        launcher: Launcher | None = None,
        *,
        workers: SharedWorkers | None = None,
        allow_weak: bool = False,
    ) -> None:
        self._permits, self._allow_weak = permits, allow_weak
        self._shared = workers or SharedWorkers()
        self._given_launcher = launcher
        self._origin: Sandbox | None = None
        """What this one's folder is still to be copied from."""
        self._forks: list[Sandbox] = []
        """Those that are still to get their copy of this one's folder."""
        self._copying = anyio.Lock()
        self._is_open = False

    @property
    def folder(self) -> Path:
        """Private to the episode; what a tool writes there is seen by its later calls."""
        return self._folder

    @property
    def isolation(self) -> Isolation:
        """What is in force around each call."""
        return self._launcher.isolation

    def fork(self) -> "Sandbox":
        """A sandbox whose folder starts as a copy of what is in this one now. The caller enters and leaves it, within this
        one's scope.

        The copy is made, off the loop, before the next call of either. Workers are not copied: theirs is memory.
        """
        forked = Sandbox(self._permits, self._launcher, workers=self._shared, allow_weak=self._allow_weak)
        forked._origin = self
        return forked

    def put(self, files: Mapping[str, str]) -> None:
        """Write texts into the episode's folder, by path, before the first call. See `agentrt.sandbox.files.put`."""
        put(self._folder, files)

    async def call(
        self,
        argv: Sequence[str],
        request: Any,
        *,
        seconds: float,
        terms: Terms = DEFAULT_TERMS,
        queued: bool = True,
        on_progress: Callable[[Progress], None] | None = None,
        outside: Address | None = None,
    ) -> ToolResult:
        """Run one tool call, `seconds` long at most. Raises `UsageError` as `require`.

        `outside` is the one address that the process can reach, as 127.0.0.1 and the same port: with L3 and `oneshot` only.

        A call that is not `queued` takes no permit: its caller bounds such calls itself. One that
        gets none within `limits.queue_seconds` is infra. `RuntimeError` outside of the scope: nothing would end what it starts.
        """
        if not self._is_open:
            raise RuntimeError("the sandbox of the episode is closed, and its folder is gone")
        require(terms, self.isolation, allow_weak=self._allow_weak)
        if outside is not None:
            require_address(terms, self.isolation)
        limits = terms.limits
        if terms.protocol == "mcp":
            request = {"name": terms.method, "arguments": request}
        seconds = min(seconds, limits.wall_seconds or seconds)
        try:
            permit = await self._permits.permit(argv, terms) if queued else Permit()
        except TimeoutError:
            text = f"there was no place to run it for {limits.queue_seconds:g} s"
            return self._noted(ToolResult(outcome="infra", text=text), limits.queue_seconds)
        with permit:
            try:
                await self._settle()
                result = await self._run(
                    argv, request, seconds=seconds, terms=terms, on_progress=on_progress, outside=outside
                )
            except OSError as error:  # no descriptor, no process, no room for the files of a fork
                result = ToolResult(outcome="infra", text=f"this machine has no room for the call: {error}")
        return self._noted(result, permit.waited)

    def _noted(self, result: ToolResult, waited: float) -> ToolResult:
        return msgspec.structs.replace(result, isolation=self.isolation.code, queue_seconds=waited)

    async def _run(
        self,
        argv: Sequence[str],
        request: Any,
        *,
        seconds: float,
        terms: Terms,
        on_progress: Callable[[Progress], None] | None,
        outside: Address | None,
    ) -> ToolResult:
        if terms.protocol == "shared":
            return await self._shared.call(
                argv, request, terms=terms, folder=self._launcher.folder,
                start=lambda folder: self._start(argv, terms, folder), seconds=seconds, on_progress=on_progress,
            )  # fmt: skip
        if terms.protocol != "oneshot":
            return await self._worker(tuple(argv), terms).call(request, seconds=seconds, on_progress=on_progress)
        return await channel.call(
            partial(self._start, argv, terms, self._folder, outside.port if outside else 0), request,
            seconds=seconds, limits=terms.limits, on_progress=on_progress, outside=outside,
        )  # fmt: skip

    async def _settle(self) -> None:
        """Before what is in the folder changes: make the copies that are owed, to this one and of it.

        One is owed until it is made: whoever waits for it may be cancelled.
        """
        if self._origin is not None:
            await self._origin._settle()
        if not self._forks:
            return
        async with self._copying:
            while self._forks:
                forked = self._forks[-1]
                await anyio.to_thread.run_sync(copy, self._folder, forked.folder)
                forked._leave_origin()

    def _leave_origin(self) -> None:
        if self._origin is not None:
            self._origin._forks.remove(self)
            self._origin = None

    def _start(self, argv: Sequence[str], terms: Terms, folder: Path, port: int = 0) -> tuple[Zygote, Job]:
        zygote = self._launcher.zygote(Kind(terms.imports, terms.readable, port > 0))
        return zygote, self._launcher.job(argv, folder, terms, port)

    def _worker(self, argv: tuple[str, ...], terms: Terms) -> Worker:
        """That of this episode, made at the first call and ended with the episode."""
        if argv not in self._workers:
            start = partial(self._start, argv, terms, self._folder)
            if terms.protocol == "mcp":
                from agentrt.sandbox.mcp import McpServer  # here, because few have the package and it takes a second

                worker: Worker = McpServer(start, terms.limits)
            else:
                worker = Worker(start, terms.limits)
            self._workers[argv] = self._scope.enter_context(worker)
        return self._workers[argv]

    def __enter__(self) -> Self:
        self._workers: dict[tuple[str, ...], Worker] = {}
        self._launcher = self._given_launcher or shared()
        with ExitStack() as stack:
            stack.enter_context(self._shared)
            self._folder = stack.enter_context(self._launcher.folder())
            self._scope = stack.pop_all()
        if self._origin is not None:
            self._origin._forks.append(self)
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._leave_origin()
        self._scope.close()


def require(terms: Terms, isolation: Isolation, *, allow_weak: bool) -> None:
    """Raise `UsageError` if a tool asks for more isolation than is in force."""
    if terms.min_isolation <= isolation.level or (allow_weak and isolation.level is Level.L1):
        return
    raise UsageError(
        f"a tool needs isolation {terms.min_isolation.name}, and this machine gives {isolation.level.name} "
        f"({'; '.join(isolation.reasons)}); {'; '.join((*isolation.fixes, 'or allow weak isolation'))}"
    )


def require_address(terms: Terms, isolation: Isolation) -> None:
    """Raise `UsageError` if a program cannot be given the one address outside."""
    if terms.protocol != "oneshot":
        raise UsageError(
            f"only a oneshot tool can be given an address outside, and this one's protocol is {terms.protocol}"
        )
    if isolation.level is not Level.L3:
        raise UsageError(
            f"a tool that is given an address outside needs isolation L3, and this machine gives {isolation.level.name} "
            f"({'; '.join(isolation.reasons)}); {'; '.join(isolation.fixes)}"
        )
