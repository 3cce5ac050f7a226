"""`SharedWorkers`: the processes of tools that serve all episodes of a run (`protocol = "shared"`).

A tool that needs long to get ready, such as a search in a large index, cannot start once a call or once an episode; one whose
call takes a fraction of a millisecond should not. Such a process is in a sandbox like any other, with a folder of its
own: it sees no episode's. It serves one call at a time. What it keeps of one it could tell to another episode, so its
manifest is the author's word that it keeps nothing and runs no code of the model.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentrt.sandbox.inside.job import Job
from agentrt.sandbox.reply import Progress
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.terms import Terms
from agentrt.sandbox.worker import Worker
from agentrt.sandbox.zygote import Zygote

CALLS_OF_PROCESS = 1000
"""Then another one takes over: `cpu_seconds` is of a process's whole life, and no call should pay for those before it."""


class SharedWorkers:
    """A context manager that each sandbox of a run enters; the last one to leave ends the processes."""

    def __init__(self) -> None:
        self._users = 0
        self._scope = ExitStack()
        self._idle: dict[tuple[str, ...], list[Worker]] = {}

    async def call(
        self,
        argv: Sequence[str],
        request: Any,
        *,
        terms: Terms,
        folder: Callable[[], AbstractContextManager[Path]],
        start: Callable[[Path], tuple[Zygote, Job]],
        seconds: float,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> ToolResult:
        """One call, by the process that was idle last, or by a new one in a folder of its own if none is.

        The permits of the run (`Terms.places`) bound how many there are. Ends as `Worker.call`.
        """
        idle = self._idle.setdefault(tuple(argv), [])
        worker = idle.pop() if idle else self._new(terms, folder, start)
        try:
            return await worker.call(request, seconds=seconds, on_progress=on_progress)
        finally:
            idle.append(worker)

    def _new(
        self,
        terms: Terms,
        folder: Callable[[], AbstractContextManager[Path]],
        start: Callable[[Path], tuple[Zygote, Job]],
    ) -> Worker:
        own = self._scope.enter_context(folder())
        return self._scope.enter_context(Worker(partial(start, own), terms.limits, CALLS_OF_PROCESS))

    def __enter__(self) -> Self:
        self._users += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users:
            self._idle.clear()
            self._scope.close()
