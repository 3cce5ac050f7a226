"""The process of the tool itself: confined, step by step and for good, before anything of the tool runs.

Order matters: limits, capabilities, no_new_privs, Landlock, and seccomp last, for each needs what the next one takes.
What depends on no job is done before there is one.
"""

import atexit
import os
import random
import resource
import signal
import socket
import sys
import threading
import traceback
from types import CodeType
from typing import NoReturn

from . import landlock, linux, root, seccomp, usage
from .job import FOLDER, MAX_MESSAGE, NUM_FDS, REPLY, STDERR, STDIN, Job, Limits, Ready, Setup, compiled, read_job

STATUS = REPLY + 1
"""Where a payload gets its job, and says why it could not start the tool; closed when it starts."""
OPEN_FILES = 1024
"""The zygote's own limit, so that all that a payload must close is below it."""


def run(setup: Setup, ready: Ready, channel_fd: int) -> NoReturn:
    """Make ready, wait for a job on the socket `channel_fd`, and become its tool. Never returns."""
    rules = _make_ready(setup, channel_fd)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=STATUS)
    message, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE, NUM_FDS - 1)
    if not message:
        os._exit(0)
    channel.detach()
    job = read_job(message)
    try:
        for number, fd in enumerate(fds, STDIN):
            os.dup2(fd, number)
        os.environ.update(job.environment)
        _limit(job.limits, 0 if setup.namespaces else usage.tasks(os.getuid()))
        _confine(setup, ready, job, rules)
        os.closerange(STATUS + 1, OPEN_FILES)
        code = _code(setup, ready, job.program)
        if code is None:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execvpe(job.argv[0], job.argv, job.environment)
    except OSError as error:
        os.write(STATUS, f"{job.argv[0]}: cannot be started: {error.strerror}".encode())
        os._exit(127)
    os.close(STATUS)
    os._exit(_execute(code, job.argv[3:]))


def _make_ready(setup: Setup, channel_fd: int) -> int:
    """All that can be done without a job. The rules of Landlock so far, or -1.

    Of the descriptors, only `channel_fd` is kept, as STATUS; what a payload will have is taken, so that what comes with
    the job comes behind.
    """
    linux.die_with_parent(signal.SIGKILL)
    os.setsid()
    os.dup2(channel_fd, STATUS, inheritable=False)
    os.dup2(STDIN, REPLY)
    os.closerange(STATUS + 1, OPEN_FILES)
    os.environ.clear()
    random.seed()  # its state is the zygote's, and so is numpy's
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if setup.namespaces:
        linux.set_capabilities(0)
    linux.no_new_privileges()
    if not setup.landlock:
        return -1
    if setup.namespaces:
        return landlock.ruleset(setup.landlock, ["/"], ["/tmp", "/dev"])
    readable = [*root.SYSTEM, *root.MERGED, *root.DEVICES, *setup.readable]
    return landlock.ruleset(setup.landlock, readable, ["/dev/null", "/dev/zero", "/dev/full"])


def _code(setup: Setup, ready: Ready, path: str | None) -> CodeType | None:
    """What this process can run itself; None if an interpreter has to be started."""
    if path is None:
        return None
    try:
        return ready.programs.get(path) or compiled(setup, path)
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
            stream.flush()
        except (OSError, ValueError):
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
