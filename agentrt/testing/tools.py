"""Tools that are functions: they start no process, so they run in virtual time."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import anyio

from agentrt.core import clock
from agentrt.env.tool import Tool
from agentrt.sandbox.relay import Address
from agentrt.sandbox.reply import Progress
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.terms import DEFAULT_TERMS, Terms

Function = Callable[[Any], Awaitable[str | ToolResult]]
"""Given the arguments; gives the text of an ok result, or a whole result."""


def fake_tool(name: str, parameters: Mapping[str, Any] | None = None) -> Tool:
    """A tool that `FakeSandbox` runs, by its name. Without `parameters` it takes any object."""
    schema = dict(parameters or {"type": "object"})
    return Tool(name=name, description=f"The tool {name}.", parameters=schema, argv=(name,))


class FakeSandbox:
    """Stands in for `agentrt.sandbox.sandbox.Sandbox`: one for all episodes, over functions by tool name.

    It holds the call's time limit, as the real one does.
    """

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = functions
        self.calls: list[tuple[str, Any]] = []
        """Tool and arguments of what was run, in order."""
        self.files: dict[str, str] = {}
        """What the last episode that started with files was given."""
        self.num_open = 0
        """Scopes entered and not left."""

    def fork(self) -> "FakeSandbox":
        return self

    def put(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)

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
        (name,) = argv
        self.calls.append((name, request))
        started = clock.now()
        with anyio.move_on_after(seconds):
            given = await self._functions[name](request)
            if isinstance(given, ToolResult):
                return given
            size, seconds = len(given.encode()), clock.now() - started
            return ToolResult(outcome="ok", text=given, exit_code=0, seconds=seconds, total_bytes=size)
        return ToolResult(outcome="timeout", text="", exit_code=124, seconds=clock.now() - started)

    def __enter__(self) -> Self:
        self.num_open += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.num_open -= 1
