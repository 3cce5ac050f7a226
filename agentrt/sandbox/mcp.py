"""`McpServer`: an MCP server as a worker: `ClientSession` of the `mcp` package over the pipes of a sandboxed process.

So the kill, the caps and the limits are the sandbox's own. The server lives as long as the episode; a session of the
package lives for one call, whose tasks are that call's, and takes over what the first one has agreed with the server.
A message longer than `limits.reply_bytes` ends the server. Its noise, lines that are no messages, is dropped.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import mcp_types
from anyio.lowlevel import checkpoint
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from agentrt.sandbox.inside.job import Job
from agentrt.sandbox.process import Process
from agentrt.sandbox.reply import Progress, Said
from agentrt.sandbox.terms import ToolLimits
from agentrt.sandbox.worker import Worker
from agentrt.sandbox.zygote import Zygote

LINES_A_TURN = 64
"""Of noise, before others have their turn: half a millisecond of the event loop."""
Incoming = SessionMessage | Exception
Ask = Callable[[ClientSession], Awaitable[Said]]


class Lines:
    """Bytes in, whole lines out; what is too long for one ends it."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._rest, self._lines = bytearray(), list[bytes]()
        self.is_too_long = False

    def feed(self, data: bytes) -> None:
        """Take what was read."""
        *lines, rest = bytes(self._rest + data).split(b"\n")
        self._rest = bytearray(rest)
        self._lines += filter(None, lines)
        self.is_too_long |= max(map(len, (*lines, rest))) > self._cap

    @property
    def are_there(self) -> bool:
        """There is something to take, or nothing ever again."""
        return bool(self._lines) or self.is_too_long

    def take(self) -> list[bytes]:
        """All lines that have come."""
        lines, self._lines = self._lines, []
        return lines


class McpServer(Worker):
    """A request is `{"name": ..., "arguments": {...}}`; without a name it is for the list of tools."""

    def __init__(self, start: Callable[[], tuple[Zygote, Job]], limits: ToolLimits) -> None:
        super().__init__(start, limits)
        self._lines = Lines(limits.reply_bytes)
        self._agreed: mcp_types.InitializeResult | None = None
        self._answer: Said | None = None

    def _take_stdout(self) -> Callable[[bytes], None]:
        self._lines, self._agreed = Lines(self._limits.reply_bytes), None
        return self._lines.feed

    async def _greet(self, process: Process) -> str:
        async def initialize(session: ClientSession) -> Said:
            self._agreed = await session.initialize()
            return Said("ok", None)

        await self._converse(process, initialize)
        return "" if self._agreed is not None or self._answer is None else str(self._answer.text)

    async def _ask(self, process: Process, request: Any) -> None:
        name, arguments = request["name"], request["arguments"]

        async def call(session: ClientSession) -> Said:
            if not name:
                return Said("ok", await tools(session, self._limits.output_bytes))
            return await self._call(session, name, arguments)

        await self._converse(process, call)

    def _said(self, process: Process) -> Said | None:
        return self._answer

    async def _converse(self, process: Process, ask: Ask) -> None:
        self._answer = None
        try:
            async with self._session(process) as session:
                try:
                    self._answer = await ask(session)
                except (
                    MCPError,
                    RuntimeError,
                ) as error:  # a refusal, its end, a version that the package does not speak
                    self._answer = Said("tool_error", str(error) if process.status is None else "the server has ended")
                except ValidationError as error:
                    self._answer = Said(
                        "tool_error", f"the server's answer is not as MCP has it: {error.errors()[0]['msg']}"
                    )
        finally:
            self._is_broken = self._lines.is_too_long
            if self._is_broken:
                self._answer = Said("output", f"the server's message has more than {self._limits.reply_bytes} bytes")

    async def _call(self, session: ClientSession, name: str, arguments: dict[str, Any]) -> Said:
        """Not `session.call_tool`, which checks results against the server's own schema: hostile patterns take for ever."""

        async def progressed(progress: float, total: float | None, message: str | None) -> None:
            if total and 0 <= progress <= total < math.inf:
                self._hear_progress(Progress(progress / total))

        params = mcp_types.CallToolRequestParams(name=name, arguments=arguments)
        request = mcp_types.CallToolRequest(params=params)
        result = await session.send_request(request, mcp_types.CallToolResult, progress_callback=progressed)
        return Said("tool_error" if result.is_error else "ok", "\n".join(map(text_of, result.content)))

    @asynccontextmanager
    async def _session(self, process: Process) -> AsyncIterator[ClientSession]:
        """A session over the pipes; it ends, and what waits on it raises `MCPError`, if the process does."""
        deliver, incoming = anyio.create_memory_object_stream[Incoming]()
        outgoing, collect = anyio.create_memory_object_stream[SessionMessage]()
        async with deliver, incoming, outgoing, collect, anyio.create_task_group() as pumps:
            pumps.start_soon(self._pump_out, collect)
            pumps.start_soon(self._pump_in, process, deliver)
            async with ClientSession(incoming, outgoing) as session:
                if self._agreed is not None:
                    session.adopt(self._agreed)
                yield session
            pumps.cancel_scope.cancel()

    async def _pump_in(self, process: Process, deliver: MemoryObjectSendStream[Incoming]) -> None:
        async with deliver:
            while process.status is None and not self._lines.is_too_long:
                await process.read_until(lambda: self._lines.are_there)
                for index, line in enumerate(self._lines.take()):
                    if index % LINES_A_TURN == 0:
                        await checkpoint()
                    with suppress(ValidationError, anyio.BrokenResourceError):  # noise, or nobody listens any more
                        message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                        await deliver.send(SessionMessage(message))

    async def _pump_out(self, collect: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async for sent in collect:
            await self._write_all(sent.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")


async def tools(session: ClientSession, cap: int) -> str:
    """Every tool over all pages, as JSON. `RuntimeError` if that is longer than `cap` bytes: there may be no last page."""
    params, found, size = mcp_types.PaginatedRequestParams(), list[str](), 1
    while True:
        page = await session.list_tools(params=params)
        more = [tool.model_dump_json(by_alias=True, exclude_none=True) for tool in page.tools]
        size += sum(len(one.encode()) + 1 for one in more)
        if size > cap:
            raise RuntimeError(f"it is longer than {cap} bytes")
        found += more
        if not page.next_cursor:
            return f"[{','.join(found)}]"
        params = mcp_types.PaginatedRequestParams(cursor=page.next_cursor)


def text_of(part: mcp_types.ContentBlock) -> str:
    """A part of a result, as the model reads it."""
    return part.text if isinstance(part, mcp_types.TextContent) else f"[{part.type}]"
