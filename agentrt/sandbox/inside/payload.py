"""The process of the tool itself: confined, step by step and for good, before anything of the tool runs.

Order matters: limits, capabilities, no_new_privs, Landlock, and seccomp last, for each needs what the next one takes.
"""

import fcntl
import os
import resource
import signal
import sys
import traceback
from types import CodeType
from typing import NoReturn

from . import landlock, linux, root, seccomp
from .job import FOLDER, REPLY, STDERR, Job, Limits, Setup

STATUS = REPLY + 1
"""Where a payload says why it could not start the tool; closed when it starts."""
OPEN_FILES = 1024
"""The zygote's own limit, so that all that a payload must close is below it."""
_FIRST_SPARE = 64


def run(setup: Setup, job: Job, fds: list[int], status: int, code: CodeType | None) -> NoReturn:
    """Become the tool of `job`, with `fds` as its standard input, output, error and reply. Never returns."""
    try:
        linux.die_with_parent(signal.SIGKILL)
        os.setsid()
        _take(fds, status)
        os.environ.clear()
        os.environ.update(job.environment)
        _limit(job.limits)
        _confine(setup, job.folder)
        if code is None:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execvpe(job.argv[0], job.argv, job.environment)
    except OSError as error:
        os.write(STATUS, f"{job.argv[0]}: cannot be started: {error.strerror}".encode())
        os._exit(127)
    os.close(STATUS)
    os._exit(_execute(code, job.argv[3:]))


def _take(fds: list[int], status: int) -> None:
    spare = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_SPARE) for fd in (*fds, status)]
    for number, fd in enumerate(spare):
        os.dup2(fd, number, inheritable=number != STATUS)
    os.closerange(STATUS + 1, OPEN_FILES)


def _limit(limits: Limits) -> None:
    cpu = int(limits.cpu_seconds) + 1
    for name, soft, hard in (
        (resource.RLIMIT_NPROC, limits.processes, limits.processes),
        (resource.RLIMIT_AS, limits.address_bytes or resource.RLIM_INFINITY, limits.address_bytes or -1),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, limits.file_bytes, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.files, limits.files),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        resource.setrlimit(name, (soft, hard))


def _confine(setup: Setup, folder: str) -> None:
    if setup.namespaces:
        linux.set_capabilities(0)
        readable, writable = ["/"], [FOLDER, "/tmp", "/dev"]
    else:
        own = f"{setup.episodes}/{folder}"
        readable = [*root.SYSTEM, *root.MERGED, *root.DEVICES, *setup.readable]
        writable = [own, "/dev/null", "/dev/zero", "/dev/full"]
        os.chdir(own)
    linux.set_dumpable(True)
    linux.no_new_privileges()
    if setup.landlock:
        landlock.restrict(setup.landlock, readable, writable)
    if setup.seccomp:
        seccomp.install()


def _execute(code: CodeType, argv: list[str]) -> int:
    """Run a program as `python -I -S FILE` would; its exit code."""
    sys.argv = argv
    sys.path[:] = [path for path in sys.path if path not in _OWN_PATHS]
    main = type(sys)("__main__")
    main.__dict__.update(__file__=argv[0], __builtins__=__builtins__)
    sys.modules["__main__"] = main
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # its state was copied from the zygote
    exit_code = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        exit_code = _exit_code(end)
    except BaseException as error:  # the tool's own, shown as the interpreter shows it
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, frames)
        exit_code = 1
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
