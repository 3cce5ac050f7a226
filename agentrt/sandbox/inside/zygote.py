"""The zygote: a small process that has everything loaded and forks into each call.

It is started once by the runtime, on one end of a socket. The first message sets it up; every other one is a job, with
five descriptors: the call's own socket, standard input, output, error and reply. If the set-up failed, every job is told
why. It holds no secret: its environment is empty, and it never reads a file of the user's.

With namespaces it is process 1 of one of its own, so whatever ends it ends all its calls. When the runtime is gone its
calls see that by themselves, and it leaves after the last one.
"""

import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType

from . import linux, payload, root, supervisor
from .job import Job, Ready, Setup, read_job, read_setup

MAX_MESSAGE = 1 << 20
NUM_FDS = 5
STANDARD = (
    "argparse", "ast", "base64", "bisect", "calendar", "collections", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "glob", "hashlib", "heapq", "inspect", "io", "itertools",
    "json", "math", "operator", "os", "pathlib", "pickle", "pprint", "queue", "random", "re", "select", "shlex",
    "shutil", "signal", "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading", "time",
    "traceback", "types", "typing", "unicodedata", "uuid",
)  # fmt: skip
"""Imported by every zygote: what model-written code asks for most."""
_NAMESPACES = linux.CLONE_NEWUSER | linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS


def main(control_fd: int) -> None:
    """Serve until the runtime closes its end."""
    with socket.socket(fileno=control_fd) as control:
        setup = read_setup(control.recv(MAX_MESSAGE))
        try:
            ready = _prepare(setup)
        except (OSError, ImportError) as error:
            _refuse(control, linux.why(error))
            return
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        programs: dict[str, CodeType] = {}
        for message, fds in _messages(control):
            _start(setup, read_job(message), control, fds, ready, programs)
    with suppress(ChildProcessError):
        os.waitpid(-1, 0)  # with SIGCHLD ignored, this returns when there is no child left


def _messages(control: socket.socket) -> Iterator[tuple[bytes, list[int]]]:
    """Every message, and the descriptors that came with it, until the runtime closes its end."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, NUM_FDS)
        if not message:
            return
        yield message, fds


def _refuse(control: socket.socket, why: str) -> None:
    """Tell every job that it cannot run."""
    for _, fds in _messages(control):
        with socket.socket(fileno=fds[0]) as call, suppress(OSError):
            call.send(json.dumps({"infra": why}).encode())
        for fd in fds[1:]:
            os.close(fd)


def _prepare(setup: Setup) -> Ready:
    """Take on what all calls share."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (payload.OPEN_FILES, payload.OPEN_FILES))
    has_proc = False
    is_root = os.getuid() == 0 != setup.uid
    if setup.namespaces:
        _isolate(setup.uid if is_root else None)
        has_proc = root.build(setup.root, setup.readable, setup.episodes)
    if is_root and os.getuid() == 0:
        is_closed = not setup.namespaces and not _is_open(sys.executable)
        linux.become(setup.uid, keep=1 << linux.CAP_DAC_READ_SEARCH if is_closed else 0)
    if setup.namespaces:
        linux.die_with_parent(signal.SIGKILL)  # here, because a change of user undoes it
    sys.path += setup.paths
    for name in (*STANDARD, *setup.imports):
        importlib.import_module(name)
    gc.freeze()  # what is here is never garbage: a fork's collections leave its pages alone
    compile("ready = 1", "<zygote>", "exec")  # the first one costs a millisecond, which no call should pay
    return Ready(has_proc, os.getuid(), os.getgid())


def _isolate(drop_to: int | None) -> None:
    """Into namespaces of its own, as their process 1. The process before stays to wait, and dies with it.

    Root (`drop_to` is whom it becomes later) needs no user namespace, unless it is one without the right to mount, as
    in containers: then it becomes that user at once.
    """
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    if drop_to is None or not _is_unshared(flags):
        if drop_to is not None:
            linux.become(drop_to)
        uid, gid = os.getuid(), os.getgid()
        linux.unshare(flags | linux.CLONE_NEWUSER)
        root.map_user(uid, uid, gid)
    first = os.fork()
    if first:
        os.closerange(3, payload.OPEN_FILES)
        os.waitpid(first, 0)
        os._exit(0)


def _is_unshared(flags: int) -> bool:
    try:
        linux.unshare(flags)
    except PermissionError:
        return False
    return True


def _is_open(path: str) -> bool:
    """True if everybody can get to a file."""
    folder = os.path.dirname(path)
    while folder != "/":
        if not os.stat(folder).st_mode & 0o001:
            return False
        folder = os.path.dirname(folder)
    return True


def _start(
    setup: Setup, job: Job, control: socket.socket, fds: list[int], ready: Ready, programs: dict[str, CodeType]
) -> None:
    """Fork into the supervisor of a job. What fails is said on the call's socket."""
    call = socket.socket(fileno=fds[0])
    try:
        code = _compiled(setup, job, programs)
        pid = linux.clone(_NAMESPACES) if setup.namespaces else os.fork()
        if pid == 0:
            control.close()
            supervisor.run(setup, job, call, fds[1:], code, ready)
    except OSError as error:
        with suppress(OSError):
            call.send(json.dumps({"infra": linux.why(error)}).encode())
    finally:
        call.close()
        for fd in fds[1:]:
            os.close(fd)


def _compiled(setup: Setup, job: Job, programs: dict[str, CodeType]) -> CodeType | None:
    """The code that a fork can run itself; None if an interpreter has to be started.

    Only programs among what the operator made readable: what a model wrote is never looked at in here.
    """
    path = job.program
    if path is None or not any(path == name or path.startswith(f"{name}/") for name in setup.readable):
        return None
    if path not in programs:
        try:
            with open(path, "rb") as file:
                programs[path] = compile(file.read(), path, "exec", dont_inherit=True)
        except (OSError, SyntaxError, ValueError):
            return None
    return programs[path]
