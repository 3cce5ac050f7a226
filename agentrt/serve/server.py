"""`serving`: the application on a socket, for as long as a block lasts. uvicorn runs on asyncio alone."""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import uvicorn
from starlette.types import ASGIApp

from agentrt.core.errors import UsageError

GRACE_SECONDS = 5
"""How long replies under way may take after the end."""


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; `UsageError` if it cannot be had. Its owner closes it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise UsageError(
            f"cannot listen at {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from error
    sock.listen(2048)
    return sock


@asynccontextmanager
async def serving(app: ASGIApp, sock: socket.socket) -> AsyncIterator[None]:
    """Answer what comes to `sock` until the block is left. Borrows the socket."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=GRACE_SECONDS, ws="none"
    )
    server = _Server(config)

    async def serve() -> None:
        with anyio.CancelScope(shield=True):  # it ends by itself, in order, within the grace
            await server.serve(sockets=[sock])

    async with anyio.create_task_group() as group:
        group.start_soon(serve)
        try:
            yield
        finally:
            server.should_exit = True
