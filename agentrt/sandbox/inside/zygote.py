"""The zygote: a small process that has everything loaded and forks the slots that calls run in.

It is started once by the runtime, on one end of a socket. The first message sets it up; every other one is a job, with
five descriptors: the call's own socket, standard input, output, error and reply. A **slot** (a `supervisor` and its
`payload`) is made ready before its job comes: all payloads wait on the socket, whichever gets a job runs it, and the zygote
sees to it that enough are waiting. So what a call has to wait for is only what differs from call to call. If the set-up
failed, every job is told why. The zygote holds no secret: its environment is empty, and it never reads a file of the user's.

With namespaces it is process 1 of one of its own, so whatever ends it ends all its calls. When the runtime is gone its
calls see that by themselves, and it leaves after the last one.
"""

import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress

from . import linux, payload, root, seccomp, supervisor
from .job import MAX_MESSAGE, Ready, Setup, learn, read_setup, refuse_one

STANDARD = (
    "ast", "bisect", "calendar", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions",
    "functools", "heapq", "inspect", "io", "itertools", "json", "math", "operator", "os", "pathlib", "random", "re",
    "statistics", "string", "textwrap", "threading", "time", "traceback", "types", "typing",
)  # fmt: skip
"""Imported by every zygote: what model-written code asks for most. Not more: whatever is here, every fork has to copy (with
hashlib, subprocess, tempfile and a dozen like them a call took a seventh longer), and a call can import the rest itself."""
_NAMESPACES = linux.CLONE_NEWUSER | linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC
"""Of each call. It shares the zygote's network, which has no way out (a call with a port has its own), and its host name,
which none may change."""
CALLS_OF_KEPT = 1000
"""Of a slot that is kept; then another one is."""
_MAX_SAID = 65_536
"""What a pipe holds."""


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
        _keep_warm(setup, control, ready)
    with suppress(ChildProcessError):
        os.waitpid(-1, 0)  # with SIGCHLD ignored, this returns when there is no child left


def _keep_warm(setup: Setup, control: socket.socket, ready: Ready) -> None:
    """Have slots ready until the runtime has closed its end and every job that it sent is taken.

    What a slot writes to its pipe says that it has got a job, and with which program, or that it is ready again. The pipe ends
    with the slot.
    """
    waiting, kept, poller = set[int](), set[int](), select.poll()
    poller.register(control, 0)  # its end only
    is_closing = False
    while not (is_closing and _is_drained(control)):
        while len(waiting) < setup.warm:
            is_kept = len(kept) < setup.kept
            try:
                slot = _fork_slot(setup, control, ready, CALLS_OF_KEPT if is_kept else 1)
            except OSError as error:
                if not refuse_one(control, linux.why(error)):
                    return
            else:
                waiting.add(slot)
                poller.register(slot, select.POLLIN)
                if is_kept:
                    kept.add(slot)
        for fd, _ in poller.poll():
            if fd == control.fileno():
                poller.unregister(fd)
                is_closing = True
                continue
            said = os.read(fd, _MAX_SAID)
            for path in map(os.fsdecode, said.split(b"\n")):
                learn(setup, ready, path)
            if said.endswith(supervisor.IDLE):
                waiting.add(fd)
                continue
            waiting.discard(fd)
            if not said or fd not in kept:
                kept.discard(fd)
                poller.unregister(fd)
                os.close(fd)


def _fork_slot(setup: Setup, control: socket.socket, ready: Ready, calls: int) -> int:
    """One more slot, for so many calls: the end of its pipe."""
    reading, writing = os.pipe()
    try:
        if linux.fork(_namespaces(setup)) == 0:
            supervisor.run(setup, ready, control, writing, calls)
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return reading


def _namespaces(setup: Setup) -> int:
    if not setup.namespaces:
        return 0
    return _NAMESPACES | (linux.CLONE_NEWNET if setup.has_port else 0)


def _is_drained(control: socket.socket) -> bool:
    """True if the runtime has closed its end and no job is left."""
    with suppress(BlockingIOError):
        return not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False


def _refuse(control: socket.socket, why: str) -> None:
    """Tell every job that it cannot run."""
    while refuse_one(control, why):
        pass


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
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # it comes at its first use, and payloads reseed it
    gc.freeze()  # what is here is never garbage: a fork's collections leave its pages alone
    gc.disable()  # and until there is a tool, nothing is
    compile("ready = 1", "<zygote>", "exec")  # the first one costs a millisecond, which no call should pay
    filter_bytes = seccomp.own_program(has_tcp=setup.has_port) if setup.seccomp else b""
    return Ready(has_proc, os.getuid(), os.getgid(), filter_bytes, {})


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
