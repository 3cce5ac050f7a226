"""One HTTP exchange: a body that is not too long, a client that may go away, a reply or a stream, errors in OpenAI's form."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Send

from agentrt.core.errors import AgentrtError, RequestError, UsageError
from agentrt.serve.replies import encoded, error_body
from agentrt.serve.requests import BadRequest

CLIENT_GONE = 499
"""The status that is counted for a client that went away; nobody is told it."""


async def read_body(request: Request, limit: int) -> bytes:
    """The body; `BadRequest` as soon as it is longer than `limit` bytes, and for a client that goes away before its end."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise BadRequest(f"the body is longer than {limit} bytes", status=413)
    except ClientDisconnect as error:
        raise BadRequest("the client went away", status=CLIENT_GONE) from error
    return bytes(body)


@asynccontextmanager
async def while_connected(receive: Receive, out: "Out") -> AsyncIterator[None]:
    """Cancel the block when the client goes away before `out` is done. The body has been read before."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(_watch, receive, out, scope)
            try:
                yield
            finally:
                group.cancel_scope.cancel()


async def _watch(receive: Receive, out: "Out", scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not out.is_done:
        out.status = CLIENT_GONE
        scope.cancel()


class Out:
    """What goes to the client: one reply, or a stream that begins with its first event."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = self.is_done = False
        self.status = 500
        """Of what was sent. What is nobody's error becomes 500, after us."""

    async def reply(self, data: dict[str, Any], status: int = 200) -> None:
        """A JSON reply."""
        body = encoded(data)
        await self._start(status, b"application/json", [(b"content-length", str(len(body)).encode())])
        self.is_done = True
        await self._send({"type": "http.response.body", "body": body})

    async def event(self, data: bytes) -> None:
        """One event of a stream."""
        if not self.has_started:
            await self._start(200, b"text/event-stream", [(b"cache-control", b"no-store")])
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The end of a stream."""
        self.is_done = True
        await self._send({"type": "http.response.body", "body": b""})

    async def failure(self, error: AgentrtError) -> None:
        """An error: a reply of its own, or the last event of a stream that has begun."""
        data, self.status = described(error)
        if not self.has_started:
            await self.reply(data, self.status)
        else:
            await self.event(b"data: " + encoded(data) + b"\n\n")
            await self.end()

    async def _start(self, status: int, kind: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_started, self.status = True, status
        headers = [(b"content-type", kind), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def described(error: AgentrtError) -> tuple[dict[str, Any], int]:
    """An error in OpenAI's form, and its status."""
    if isinstance(error, BadRequest):
        kind = "invalid_request_error" if error.status < 500 else "api_error"
        return error_body(error.message, kind=kind, param=error.param), error.status
    is_theirs = isinstance(error, (RequestError, UsageError))
    status, kind = (400, "invalid_request_error") if is_theirs else (500, "api_error")
    return error_body(str(error), kind=kind), status
