"""A slot: made ready for one call, and then the parent of its processes: holds its limits, ends all of them, says how it
went.

Inside namespaces it is process 1 of the call: one signal ends all others, whatever they did to hide, and the kernel
does the same should it die itself. Without namespaces it adopts every orphan of the call and kills until none is left.

Two messages go to the runtime: an empty one when the tool is begun (with the socket that listens at the call's port, if it
has one), and how it went, at the end. The call ends when its
main process ends, when a limit is passed, or when the runtime closes its end of the socket.
"""

import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

from . import linux, payload, root, usage
from .job import FOLDER, MAX_MESSAGE, NUM_FDS, Job, Ready, Setup, read_job

TICK_SECONDS = 0.05
"""Between two looks at what a call uses."""
DISK_SECONDS = 0.25
"""As above, for the folder, which takes longer to look at."""
_MAX_STATUS = 4096


def run(setup: Setup, ready: Ready, control: socket.socket, taken: int) -> NoReturn:
    """Make ready, wait for a job on `control`, say on `taken` that there was one, and run it. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    failure, main, channel = "", 0, control
    try:
        main, channel = _make_ready(setup, ready, control)
    except OSError as error:
        failure = linux.why(error)
    message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, NUM_FDS)
    if message:
        control.close()
        job = read_job(message)
        os.write(taken, (job.program or "").encode())
        os.close(taken)
        call = socket.socket(fileno=fds[0])
        try:
            status = {"infra": failure} if failure else _run(setup, job, message, call, fds[1:], main, channel)
        except OSError as error:
            status = {"infra": linux.why(error)}
        with suppress(OSError):  # the runtime has gone, or has no more interest
            call.send(json.dumps(status).encode())
    os._exit(0)


def _make_ready(setup: Setup, ready: Ready, control: socket.socket) -> tuple[int, socket.socket]:
    """All that can be done without a job; the payload's process, and the socket on which it waits for one."""
    if setup.namespaces:
        root.map_user(root.USER, ready.uid, ready.gid)
        root.enter(ready.has_proc, setup.readable)
        if setup.has_port:
            linux.loopback_up()
    else:
        linux.adopt_orphans()
    linux.set_dumpable(False)
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    main = os.fork() if setup.imports else linux.fork()  # what was imported may have hooks of its own
    if main == 0:
        payload.run(setup, ready, theirs.detach())
    theirs.close()
    return main, channel


def _run(
    setup: Setup, job: Job, message: bytes, call: socket.socket, fds: list[int], main: int, channel: socket.socket
) -> dict[str, object]:
    folder, listener = f"{setup.episodes}/{job.folder}", list[int]()
    if setup.namespaces:
        root.open_folder(job.folder, job.limits)
        folder = FOLDER
        listener = [_listener(job.port)] if job.port else []
        linux.no_new_privileges()
        linux.set_capabilities(0)
    call_tree = _Tree(main, is_alone=setup.namespaces, folder=folder, job=job)
    socket.send_fds(channel, [message], fds)
    for fd in fds:
        os.close(fd)
    try:
        with suppress(BrokenPipeError):  # the runtime has gone: watching finds that too
            socket.send_fds(call, [b"{}"], listener)
        for fd in listener:  # the runtime takes its connections
            os.close(fd)
        why = call_tree.watch(call)
    finally:
        call_tree.end()
    failure = channel.recv(_MAX_STATUS).decode(errors="replace")
    if failure:
        return {"infra": failure}
    return {"code": call_tree.code, "why": why, "cpu_seconds": usage.cpu_seconds(())}


def _listener(port: int) -> int:
    """A socket that listens at the one port of the call's own network."""
    return socket.create_server(("127.0.0.1", port)).detach()


class _Tree:
    """All processes of one call."""

    def __init__(self, main: int, *, is_alone: bool, folder: str, job: Job) -> None:
        self._main, self._is_alone, self._folder, self._limits = main, is_alone, folder, job.limits
        used = usage.disk(folder, 1 << 62, self._limits.inodes)
        # a call that finds the folder too full may make room
        self._max_disk, self._max_inodes = max(self._limits.disk_bytes, used[0]), max(self._limits.inodes, used[1])
        self.code: int | None = None
        """How the main process ended: its exit code, or minus the signal; None while it runs."""

    def watch(self, call: socket.socket) -> str:
        """Wait for the end of the call; why it has to be ended, or nothing if the main process ended by itself."""
        pidfd = os.pidfd_open(self._main)
        poller = select.poll()
        poller.register(call, select.POLLIN)
        poller.register(pidfd, select.POLLIN)
        next_disk = time.monotonic() + DISK_SECONDS
        while True:
            ready = [fd for fd, _ in poller.poll(TICK_SECONDS * 1000)]
            if call.fileno() in ready:
                return "cancelled"
            self._reap(os.WNOHANG)
            if self.code is not None:
                return "cpu" if self.code == -signal.SIGXCPU else self._over_disk()
            why = self._over()
            if not why and time.monotonic() >= next_disk:
                why, next_disk = self._over_disk(), time.monotonic() + DISK_SECONDS
            if why:
                return why

    def end(self) -> None:
        """Kill and reap every process."""
        if self._is_alone:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            self._reap(0)
            return
        while self._reap(os.WNOHANG):
            for pid in self._pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)

    def _over(self) -> str:
        pids = list(self._pids())
        if usage.memory_bytes(pids, self._limits.memory_bytes) > self._limits.memory_bytes:
            return "memory"
        return "cpu" if usage.cpu_seconds(pids) > self._limits.cpu_seconds else ""

    def _over_disk(self) -> str:
        used, entries = usage.disk(self._folder, self._max_disk, self._max_inodes)
        return "disk" if used > self._max_disk or entries > self._max_inodes else ""

    def _reap(self, options: int) -> bool:
        """Collect the dead; False if there are no processes left at all."""
        try:
            while True:
                pid, status = os.waitpid(-1, options)
                if pid == 0:
                    return True
                if pid == self._main:
                    self.code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return False

    def _pids(self) -> Iterator[int]:
        if self._is_alone:
            yield from (int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1")
            return
        parents = [os.getpid()]
        while parents:
            children = _children(parents.pop())
            yield from children
            parents += children


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    return found
