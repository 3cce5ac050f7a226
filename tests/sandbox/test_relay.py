"""The one address outside that a call can be given, and that there is no other."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest
from anyio.abc import SocketStream

from agentrt.core.errors import UsageError
from agentrt.sandbox.launcher import Launcher
from agentrt.sandbox.level import Level
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.relay import Address
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox
from agentrt.sandbox.terms import Terms

HEAD = """
import os, socket, sys
port, other, udp = map(int, sys.argv[1:4])
def connect(host, port):
    with socket.create_connection((host, port), timeout=5): pass
def denied(act, *arguments):
    try: act(*arguments)
    except OSError: return
    print(act.__name__, *arguments)
"""
ASK = """
def ask(text):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(text); connection.shutdown(socket.SHUT_WR)
        said = b""
        while data := connection.recv(65536): said += data
        return said
"""
OTHER_WAYS = """
connect("127.0.0.1", port)
def send(host, port): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", (host, port))
def make(*kind): socket.socket(*kind)
def listen(): socket.socket().bind(("127.0.0.1", 0))
for address in (("127.0.0.1", other), ("127.0.0.2", port), ("10.0.0.1", port), ("8.8.8.8", 53)): denied(connect, *address)
denied(send, "127.0.0.1", udp)
for kind in ((socket.AF_INET6,), (socket.AF_UNIX,), (socket.AF_NETLINK, socket.SOCK_RAW), (socket.AF_PACKET, socket.SOCK_RAW),
             (socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_INET, socket.SOCK_RAW), (socket.AF_VSOCK, socket.SOCK_STREAM),
             (socket.AF_INET, socket.SOCK_STREAM, 262), (socket.AF_INET, socket.SOCK_STREAM, 132)): denied(make, *kind)
denied(listen)
print(open("/proc/net/route").read().count("\\n"), os.listdir("/sys") if os.path.exists("/sys") else "")
"""


@pytest.fixture
def alone(launcher: Launcher) -> Launcher:
    if launcher.isolation.level is not Level.L3:
        pytest.skip("a network of its own needs namespaces")
    return launcher


async def run(sandbox: Sandbox, code: str, outside: Address | None, *others: int, seconds: float = 20) -> ToolResult:
    ports = [outside.port if outside else 0, *others, *[0] * (2 - len(others))]
    argv = [sys.executable, "-I", "-S", "-c", HEAD + code, *map(str, ports)]
    return await sandbox.call(argv, {}, seconds=seconds, outside=outside)


async def shout(client: SocketStream) -> None:
    """A service: what it is told, in capitals, after the end of it."""
    async with client:
        said = b"".join([data async for data in client])
        await client.send(said.upper())


@contextmanager
def bound(kind: int = socket.SOCK_STREAM) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, kind) as made:
        made.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            made.listen()
        yield made


def test_the_one_port_works_both_ways_and_for_many_connections(alone: Launcher) -> None:
    code = (
        ASK
        + """
print(ask(b'hello'), len(ask(b'x' * 3000000)), [ask(b'%d' % i) for i in range(70)][-1])
many = [socket.create_connection(('127.0.0.1', port)) for _ in range(80)]
for each in many: each.sendall(b'x'); each.shutdown(socket.SHUT_WR)
print({each.recv(1) for each in many})
"""
    )

    async def main() -> ToolResult:
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as service,
            anyio.create_task_group() as group,
        ):
            group.start_soon(service.serve, shout)
            with Sandbox(Permits(1), alone) as sandbox:
                result = await run(
                    sandbox, code, Address("127.0.0.1", service.extra(anyio.abc.SocketAttribute.local_port))
                )
            group.cancel_scope.cancel()
        return result

    assert anyio.run(main).text == "b'HELLO' 3000000 b'69'\n{b'X'}\n"


def test_no_other_way_out(alone: Launcher) -> None:
    with bound() as given, bound() as other, bound(socket.SOCK_DGRAM) as udp:
        ports = [each.getsockname()[1] for each in (given, other, udp)]

        async def main() -> ToolResult:
            with Sandbox(Permits(1), alone) as sandbox:
                return await run(sandbox, OTHER_WAYS, Address("127.0.0.1", ports[0]), *ports[1:])

        result = anyio.run(main)
        assert (result.text, result.outcome) == ("1 \n", "ok"), result.stderr
        given.settimeout(5)
        given.accept()[0].close()  # the positive control: this one came through
        other.setblocking(False)
        udp.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(1)
        socket.create_connection(("127.0.0.1", ports[1])).close()  # nothing but the sandbox was in the way


def test_without_an_address_there_is_none(alone: Launcher) -> None:
    """Also right after a call that had one."""

    async def main() -> list[ToolResult]:
        with bound() as given, Sandbox(Permits(1), alone) as sandbox:
            port = given.getsockname()[1]
            code = f"connect('127.0.0.1', {port})\nprint('through')"
            return [await run(sandbox, code, address) for address in (Address("127.0.0.1", port), None)]

    given, none = anyio.run(main)
    assert given.text == "through\n"
    assert (none.outcome, "PermissionError" in none.stderr) == ("exit_nonzero", True)


def test_two_calls_reach_each_its_own_address(alone: Launcher) -> None:
    """Though both listen at the same time, and neither sees the other's network."""

    async def main() -> None:
        async def one(host: str) -> None:
            async def name(client: SocketStream) -> None:
                async with client:
                    await client.send(host.encode())

            service = await anyio.create_tcp_listener(local_host=host, local_port=port)
            async with service, anyio.create_task_group() as group:
                group.start_soon(service.serve, name)
                results.append((host, (await run(sandbox, ASK + "print(ask(b''))", Address(host, port))).text))
                group.cancel_scope.cancel()

        with Sandbox(Permits(2), alone) as sandbox:
            async with anyio.create_task_group() as calls:
                for host in ("127.0.0.1", "127.0.0.2"):
                    calls.start_soon(one, host)

    with bound() as free:
        port = free.getsockname()[1]
    results: list[tuple[str, str]] = []
    anyio.run(main)
    assert sorted(results) == [(host, f"b'{host}'\n") for host in ("127.0.0.1", "127.0.0.2")]


def test_a_service_that_is_not_there_and_one_that_says_nothing(alone: Launcher) -> None:
    with bound() as silent, bound() as gone:
        ports = [each.getsockname()[1] for each in (silent, gone)]
        gone.close()

        async def main() -> list[ToolResult]:
            with Sandbox(Permits(1), alone) as sandbox:
                return [
                    await run(sandbox, ASK + "print(ask(b'x'))", Address("127.0.0.1", port), seconds=1.0)
                    for port in ports
                ]

        hung, refused = anyio.run(main)
    assert hung.outcome == "timeout"
    assert (refused.outcome, refused.text) in {("ok", "b''\n"), ("exit_nonzero", "")}


def test_it_needs_namespaces_and_a_process_of_the_call(launcher: Launcher) -> None:
    async def call(terms: Terms) -> None:
        with Sandbox(Permits(1), launcher) as sandbox:
            await sandbox.call(["/bin/true"], {}, seconds=5, terms=terms, outside=Address("127.0.0.1", 80))

    with pytest.raises(UsageError, match="only a oneshot tool can be given an address outside"):
        anyio.run(call, Terms(protocol="worker"))
    if launcher.isolation.level is Level.L2:
        with pytest.raises(UsageError, match="needs isolation L3, and this machine gives L2"):
            anyio.run(call, Terms())
