"""`Sandbox`: where one episode's tools run. Owns the episode's folder: made on entering, removed on leaving."""

import shutil
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Any, Self

from agentrt.sandbox import channel
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.tree import adopt_orphans


class Sandbox:
    """A context manager. `permits` bounds the processes of a run; waiting for one is not charged to the tool."""

    def __init__(self, permits: AbstractAsyncContextManager[Any]) -> None:
        self._permits = permits

    @property
    def folder(self) -> Path:
        """Private to the episode; what a tool writes there is seen by its later calls."""
        return self._folder

    async def call(self, argv: Sequence[str], request: Any, *, seconds: float) -> ToolResult:
        """Run one tool call, `seconds` long at most. See `agentrt.sandbox.channel`."""
        async with self._permits:
            return await channel.call(argv, request, folder=self._folder, seconds=seconds)

    def __enter__(self) -> Self:
        adopt_orphans()
        self._folder = Path(mkdtemp(prefix="agentrt-"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
