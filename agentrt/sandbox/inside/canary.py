"""A program that tries what a tool must not, and what it must be able to, and says what worked.

Request: what there is to try (`secret` and `outside`, paths; `tcp` and `udp`, ports; `unix`, a path; `pid` and
`cookie`, of the runtime; `processes`, the limit). Reply: true or false for each act.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

_CLONE_NEWUSER = 0x1000_0000
_IO_URING_SETUP = 425


def acts(request: dict[str, Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name of an act, and the act, which raises `OSError` if it is denied."""
    yield "write_own", lambda: _write("canary.txt")
    yield "read_own", lambda: _read("canary.txt")
    yield "run_child", lambda: subprocess.run(["/bin/true"], check=True)
    yield "socket_pair", lambda: socket.socketpair()[0].close()
    yield "read_secret", lambda: _read(request["secret"])
    yield "write_outside", lambda: _write(request["outside"])
    yield "tcp", lambda: socket.create_connection(("127.0.0.1", request["tcp"]), timeout=1).close()
    yield "udp", lambda: _udp(request["udp"])
    yield "unix", lambda: _unix(request["unix"])
    yield "signal_runtime", lambda: os.kill(request["pid"], 0)
    yield "read_environment", lambda: _find(f"/proc/{request['pid']}/environ", request["cookie"])
    yield "unshare", lambda: _libc("unshare", _CLONE_NEWUSER)
    yield "io_uring", lambda: os.close(_libc("syscall", _IO_URING_SETUP, 1, ctypes.create_string_buffer(256)))
    yield "memfd", lambda: os.close(os.memfd_create("canary"))
    yield "be_root", lambda: os.setuid(0)
    yield "fork_bomb", lambda: _fork(request["processes"])


def _libc(name: str, *arguments: object) -> int:
    result: int = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def _write(path: str) -> None:
    with open(path, "w") as file:
        file.write("canary")


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _udp(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"canary", ("127.0.0.1", port))


def _unix(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def _find(path: str, cookie: str) -> None:
    with open(path, "rb") as file:
        if cookie.encode() not in file.read():
            raise OSError("another process")


def _fork(processes: int) -> None:
    """Far more children at one time than allowed: outside of a user namespace the limit is not exact."""
    children = []
    try:
        for _ in range(4 * processes):
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def main() -> None:
    """Try everything."""
    request, done = json.loads(sys.stdin.readline()), {}
    for name, act in acts(request):
        done[name] = False
        with contextlib.suppress(OSError):
            act()
            done[name] = True
    with open(int(os.environ["AGENTRT_REPLY_FD"]), "w") as reply:
        reply.write(json.dumps({"result": done}) + "\n")


if __name__ == "__main__":
    main()
