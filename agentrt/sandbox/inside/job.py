"""What the runtime sends to a zygote: how it is set up, once, and then one job a call.

By `marshal`, which both have, as they are the same interpreter: it is several times faster than JSON in a new process.
"""

import json
import marshal
import os
import socket
import sys
from contextlib import suppress
from types import CodeType
from typing import NamedTuple

EPISODES, FOLDER = "/episodes", "/w"
"""Inside namespaces: where all episodes' folders are for the zygote, and where a call finds its own."""
STDIN, STDOUT, STDERR, REPLY = 0, 1, 2, 3
"""A payload's descriptors."""
MAX_MESSAGE = 1 << 20
NUM_FDS = 5
"""With a job: the call's own socket, and a payload's."""
NUM_HANDED = 2
"""From a payload to its supervisor: the call's own socket, and the episode's folder."""
GO = b"go"
"""From a supervisor to its payload."""
FOLDERS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""How a folder is opened that is only a place."""


class Setup(NamedTuple):
    """How one zygote confines all its calls."""

    namespaces: bool
    landlock: int
    """The ABI to use; 0 for none."""
    seccomp: bool
    uid: int
    """Whom to become, if started as root; 0 if there is nobody else."""
    root: str
    """An empty folder, for the new root to be mounted on."""
    episodes: str
    """The folder of all episodes' folders."""
    readable: list[str]
    """Files and folders that every call may read and execute."""
    paths: list[str]
    """Added to `sys.path`."""
    imports: list[str]
    """Imported before the first call."""
    warm: int
    """Slots that are ready for the next calls."""
    kept: int
    """Slots that serve one call after the other."""
    has_port: bool
    """Each call has a network of its own, with one TCP port to connect to: `Job.port`."""


class Ready(NamedTuple):
    """What the set-up of a zygote came to."""

    has_proc: bool
    """A call can have a /proc of its own."""
    uid: int
    gid: int
    seccomp: bytes
    """The filter; empty for none."""
    programs: dict[str, CodeType]
    """What calls so far have run, compiled."""


class Limits(NamedTuple):
    """Of one call."""

    cpu_seconds: float
    memory_bytes: int
    """Of all its processes together."""
    address_bytes: int
    """Of each process; 0 means no limit."""
    processes: int
    files: int
    file_bytes: int
    disk_bytes: int
    inodes: int
    tmp_bytes: int


class Job(NamedTuple):
    """One call."""

    argv: list[str]
    folder: str
    """The name of the episode's folder."""
    environment: dict[str, str]
    limits: Limits
    port: int
    """Of 127.0.0.1, which the runtime will relay; 0 for none."""

    @property
    def program(self) -> str | None:
        """The Python file that a fork of the zygote can run itself, which saves the start of an interpreter."""
        is_own = len(self.argv) >= 4 and self.argv[:3] == [sys.executable, "-I", "-S"]
        return self.argv[3] if is_own and self.argv[3].endswith(".py") else None


def written(message: Setup | Job) -> bytes:
    """A message, to be sent."""
    return marshal.dumps([tuple(part) if isinstance(part, tuple) else part for part in message])


def read_setup(message: bytes) -> Setup:
    """The first message."""
    return Setup(*marshal.loads(message))


def read_job(message: bytes) -> Job:
    """Every other message."""
    argv, folder, environment, limits, port = marshal.loads(message)
    return Job(argv, folder, environment, Limits(*limits), port)


def is_shared(setup: Setup, path: str) -> bool:
    """True for what the operator made readable for every call. What a model wrote is looked at by nobody but its own call."""
    return any(path == name or path.startswith(f"{name}/") for name in setup.readable)


def compiled(path: str) -> CodeType:
    """The program at `path`, for a fork to run itself. Raises `OSError`, `SyntaxError`, `ValueError`."""
    with open(path, "rb") as file:
        code: CodeType = compile(file.read(), path, "exec", dont_inherit=True)
    return code


def learn(setup: Setup, ready: Ready, path: str) -> None:
    """Compile a program, if it is a shared one, for calls to come."""
    if path not in ready.programs and is_shared(setup, path):
        with suppress(OSError, SyntaxError, ValueError):  # the call itself finds out
            ready.programs[path] = compiled(path)


def refuse_one(control: socket.socket, why: str) -> bool:
    """Tell the next job that it cannot run; False if there will be none."""
    message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, NUM_FDS)
    if not message:
        return False
    with socket.socket(fileno=fds[0]) as call, suppress(OSError):
        call.send(json.dumps({"infra": why}).encode())
    for fd in fds[1:]:
        os.close(fd)
    return True
