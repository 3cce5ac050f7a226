"""The process of the tool itself: confined, step by step and for good, before anything of the tool runs.

Order matters: limits, capabilities, no_new_privs, Landlock, and seccomp last, for each needs what the next one takes.
What depends on no job is done before there is one.
"""

import atexit
import fcntl
import gc
import json
import marshal
import os
import random
import resource
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from types import CodeType
from typing import Any, NoReturn

from . import landlock, linux, root, seccomp, usage
from .job import (
    FOLDER,
    FOLDERS,
    GO,
    MAX_MESSAGE,
    NUM_FDS,
    REPLY,
    STDERR,
    STDIN,
    Job,
    Limits,
    Ready,
    Setup,
    compiled,
    is_shared,
    read_job,
)  # fmt: skip

STATUS = REPLY + 1
"""To the supervisor: where a payload hands over what that needs, and says why it could not start the tool; closed when it
starts."""
OPEN_FILES = 1024
"""The zygote's own limit, so that all that a payload must close is below it."""
_BEHIND = STATUS + 1
"""The first descriptor that a tool will not have."""


def run(setup: Setup, ready: Ready, control_fd: int, events: int, channel_fd: int, episodes: int) -> NoReturn:
    """Make ready, wait for a job on the socket `control_fd`, and become its tool. Never returns.

    `events` is the zygote's, `channel_fd` the supervisor's, and `episodes` the folder that the episode's is in.
    """
    try:
        failure, rules = "", _behind(_make_ready(setup))
    except OSError as error:
        failure, rules = linux.why(error), -1
    with socket.socket(fileno=control_fd) as control:
        message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, NUM_FDS)
    if not message:
        os._exit(0)
    job = read_job(message)
    with socket.socket(fileno=fds[0]) as call:
        try:
            if failure:
                raise OSError(0, failure)
            path = job.program if job.program and is_shared(setup, job.program) else ""
            os.write(events, b"\n" + os.fsencode(path))
            _hand_over(
                channel_fd, (tuple(job.limits), job.port, path), call, os.open(job.folder, FOLDERS, dir_fd=episodes)
            )
        except OSError as error:
            with suppress(OSError):
                call.send(json.dumps({"infra": linux.why(error)}).encode())
            os._exit(1)
    _take_places(channel_fd, fds[1:])
    _become(setup, ready, job, rules)


def _make_ready(setup: Setup) -> int:
    """All that can be done without a job. The rules of Landlock so far, or -1."""
    linux.die_with_parent(signal.SIGKILL)
    os.setsid()
    os.environ.clear()
    random.seed()  # its state is the zygote's, and so is numpy's
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if setup.namespaces:
        linux.set_capabilities(0)
    if not setup.landlock:
        return -1
    if setup.namespaces:
        return landlock.ruleset(setup.landlock, ["/"], ["/tmp", "/dev"])
    readable = [*root.SYSTEM, *root.MERGED, *root.DEVICES, *setup.readable]
    return landlock.ruleset(setup.landlock, readable, ["/dev/null", "/dev/zero", "/dev/full"])


def _hand_over(channel_fd: int, needed: tuple[Any, ...], call: socket.socket, folder: int) -> None:
    """Give the supervisor what it needs of a job, and wait until it is ready for that."""
    channel = socket.socket(fileno=channel_fd)
    socket.send_fds(channel, [marshal.dumps(needed)], [call.fileno(), folder])
    if not channel.recv(len(GO)):
        os._exit(1)
    channel.detach()


def _behind(fd: int) -> int:
    """A copy that no descriptor of the tool's will be put on."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _BEHIND) if fd >= 0 else fd


def _take_places(channel_fd: int, fds: list[int]) -> None:
    """The tool's descriptors, 0 to 3, and the supervisor's behind them; nothing else stays open for the tool."""
    *ours, channel = map(_behind, (*fds, channel_fd))
    for number, fd in enumerate(ours, STDIN):
        os.dup2(fd, number)
    os.dup2(channel, STATUS, inheritable=False)


def _become(setup: Setup, ready: Ready, job: Job, rules: int) -> NoReturn:
    try:
        os.environ.update(job.environment)
        _limit(job.limits, 0 if setup.namespaces else usage.tasks(os.open("/proc", FOLDERS), os.getuid()))
        _confine(setup, ready, job, rules)
        os.closerange(STATUS + 1, OPEN_FILES)
        code = _code(setup, ready, job.program)
        if code is None:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execvpe(job.argv[0], job.argv, job.environment)
    except Exception as error:  # nothing of the tool has run
        reason = error.strerror if isinstance(error, OSError) else error
        os.write(STATUS, f"{job.argv[0]}: cannot be started: {reason}".encode(errors="replace"))
        os._exit(127)
    os.close(STATUS)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    exit_code = 1
    try:
        exit_code = _execute(code, job.argv[3:])
    finally:
        os._exit(exit_code)


def _code(setup: Setup, ready: Ready, path: str | None) -> CodeType | None:
    """What this process can run itself; None if an interpreter has to be started."""
    if path is None or not is_shared(setup, path):
        return None
    try:
        return ready.programs.get(path) or compiled(path)
    except (OSError, SyntaxError, ValueError):
        return None


def _limit(limits: Limits, other_tasks: int) -> None:
    """Put limits on this process. `other_tasks` are those of the user that are counted with its own."""
    cpu = int(limits.cpu_seconds) + 1
    for name, soft, hard in (
        (resource.RLIMIT_NPROC, limits.processes + other_tasks, limits.processes + other_tasks),
        (resource.RLIMIT_AS, limits.address_bytes or resource.RLIM_INFINITY, limits.address_bytes or -1),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, limits.file_bytes, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.files, limits.files),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        resource.setrlimit(name, (soft, hard))


def _confine(setup: Setup, ready: Ready, job: Job, rules: int) -> None:
    own = FOLDER if setup.namespaces else f"{setup.episodes}/{job.folder}"
    os.chdir(own)
    linux.set_dumpable(True)
    if setup.landlock:
        landlock.allow_writing(setup.landlock, rules, own)
        if job.port and setup.landlock >= landlock.NET_ABI:
            landlock.allow_connecting(rules, job.port)
        landlock.restrict(rules)
    if ready.seccomp:
        seccomp.install(ready.seccomp)


def _execute(code: CodeType, argv: list[str]) -> int:
    """Run a program as `python -I -S FILE` would; its exit code."""
    sys.argv = argv
    sys.path[:] = [path for path in sys.path if path not in _OWN_PATHS]
    main = type(sys)("__main__")
    main.__dict__.update(__file__=argv[0], __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exit_code = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        exit_code = _exit_code(end)
    except BaseException as error:  # the tool's own, shown as the interpreter shows it
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, frames)
        exit_code = 1
    threading._shutdown()  # type: ignore[attr-defined] # what the interpreter itself calls at its end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:  # it may be any object by now
            exit_code = exit_code or 120
    return exit_code


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    os.write(STDERR, f"{end.code}\n".encode(errors="replace"))
    return 1


_OWN_PATHS = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
"""Where this package is found; no business of a tool."""
