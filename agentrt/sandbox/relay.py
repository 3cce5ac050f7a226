"""`relay`: the one address that a sandboxed process can reach.

The process has a network namespace with nothing but a loopback, in which its supervisor made one listening socket and gave
it to the runtime. A socket stays in the network that it was made in, whoever holds it; so the runtime takes the connections,
and opens one to the address outside for each. What is inside names no address: there is nothing to get wrong.
"""

import socket
from contextlib import suppress
from typing import NamedTuple

import anyio
from anyio.abc import AnyByteStream, SocketListener, SocketStream

MAX_CONNECTIONS = 64
"""Of one process at one time; more wait to be taken."""
CONNECT_SECONDS, RETRY_SECONDS = 10.0, 0.1


class Address(NamedTuple):
    """TCP. Inside, it is 127.0.0.1 and the same port."""

    host: str
    port: int


async def relay(listening: socket.socket, address: Address) -> None:
    """Serve the connections of one process until cancelled. Owns the socket. One that fails is closed, alone."""
    places = anyio.Semaphore(MAX_CONNECTIONS)
    with listening:
        async with await SocketListener.from_socket(listening) as listener, anyio.create_task_group() as group:
            while True:
                await places.acquire()  # before there is a descriptor: the process may ask for any number
                try:
                    inside = await listener.accept()
                except OSError:  # no descriptor is free
                    places.release()
                    await anyio.sleep(RETRY_SECONDS)
                else:
                    group.start_soon(_serve, inside, address, places)


async def _serve(inside: SocketStream, address: Address, places: anyio.Semaphore) -> None:
    try:
        async with inside:
            with suppress(OSError, TimeoutError):  # nobody is there: the process finds its connection closed
                with anyio.fail_after(CONNECT_SECONDS):
                    outside = await anyio.connect_tcp(*address)
                async with outside, anyio.create_task_group() as both:
                    both.start_soon(_pump, inside, outside)
                    both.start_soon(_pump, outside, inside)
    finally:
        places.release()


async def _pump(source: AnyByteStream, target: AnyByteStream) -> None:
    """Pass on what comes, and then its end. A side that is gone ends it without a word."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        async for data in source:
            await target.send(data)
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        await target.send_eof()
