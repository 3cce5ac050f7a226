"""A slot: made ready for a call, and then the parent of its processes: holds its limits, ends all of them, says how it went.

Inside namespaces it is process 1 of the call: one signal ends all others, whatever they did to hide, and the kernel
does the same should it die itself. Without namespaces it adopts every orphan of the call and kills until none is left.

Two messages go to the runtime: an empty one when the tool is begun (with the socket that listens at the call's port, if it
has one), and how it went, at the end. The call ends when its main process ends, when a limit is passed, or when the runtime
closes its end of the socket.

A slot may serve one call after the other. Nothing of one is there for the next: every process has ended, what was mounted
for it is gone, and the job itself was only ever in the payload's memory; all that its supervisor learns of a job is numbers
and descriptors. If anything of that fails, the slot ends instead.
"""

import json
import marshal
import os
import select
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import NoReturn

from . import linux, payload, root, usage
from .job import FOLDERS, GO, NUM_HANDED, Limits, Ready, Setup, learn, refuse_one

TICK_SECONDS = 0.05
"""Between two looks at what a call uses."""
DISK_SECONDS = 0.25
"""As above, for the folder, which takes longer to look at."""
IDLE = b"\nidle"
"""To the zygote: ready for another call. When it has got one, a payload says a line break and the program's path."""
_MAX_STATUS = 4096


def run(setup: Setup, ready: Ready, control: socket.socket, events: int, calls: int) -> NoReturn:
    """Make ready, serve that many of the jobs on `control`, and tell the zygote on `events`. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a first process gets only what it has a handler for
    has_forked = False
    try:
        episodes, proc = _enter(setup, ready)
        for _ in range(calls):
            if has_forked and setup.namespaces:
                root.clear()
            if has_forked:
                os.write(events, IDLE)  # before there is a payload, whose word that it has got a job is to come after
            main, channel = _fork_payload(setup, ready, control, events, episodes)
            has_forked = True
            with channel:
                _serve(setup, ready, main, channel, proc)
    except OSError as error:
        if not has_forked:
            refuse_one(control, linux.why(error))
    finally:
        os._exit(0)


def _fork_payload(
    setup: Setup, ready: Ready, control: socket.socket, events: int, episodes: int
) -> tuple[int, socket.socket]:
    """The process of the next tool, which waits for its job, and the socket to it."""
    if setup.namespaces:
        root.furnish(setup.readable)
        linux.number_processes_from(2)
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    main = os.fork() if setup.imports else linux.fork()  # what was imported may have hooks of its own
    if main == 0:
        payload.run(setup, ready, control.detach(), events, theirs.detach(), episodes)
    theirs.close()
    return main, channel


def _enter(setup: Setup, ready: Ready) -> tuple[int, int]:
    """All that is the same for every call of the slot: the folder of all episodes' folders, seen by nobody else, and the
    /proc to look at a call's processes in."""
    if setup.namespaces:
        root.map_user(root.USER, ready.uid, ready.gid)
        opened = root.enter(ready.has_proc)
        if setup.has_port:
            linux.loopback_up()
    else:
        linux.adopt_orphans()
        opened = os.open(setup.episodes, FOLDERS), os.open("/proc", FOLDERS)
    linux.no_new_privileges()
    linux.set_dumpable(False)
    return opened


def _serve(setup: Setup, ready: Ready, main: int, channel: socket.socket, proc: int) -> None:
    """One call, whose payload is there: until no process of it is left. Ends the slot if that cannot be had."""
    message, fds, _, _ = socket.recv_fds(channel, _MAX_STATUS, NUM_HANDED)
    if not message:  # it got no job, or could not use it
        os._exit(0)
    limits, port, program = marshal.loads(message)
    with socket.socket(fileno=fds[0]) as call:
        try:
            tree = _Tree(main, is_alone=setup.namespaces, proc=proc, folder=fds[1], limits=Limits(*limits))
            status = _run(setup, tree, port, call, channel)
        except OSError as error:
            status = {"infra": linux.why(error)}
        with suppress(OSError):  # the runtime has gone, or has no more interest
            call.send(json.dumps(status).encode())
    os.close(fds[1])
    if "infra" in status:
        os._exit(0)
    learn(setup, ready, program)


def _run(setup: Setup, tree: "_Tree", port: int, call: socket.socket, channel: socket.socket) -> dict[str, object]:
    with ExitStack() as opened:
        listeners = [opened.enter_context(socket.create_server(("127.0.0.1", port)))] if port else []
        if setup.namespaces:
            root.open_folder(tree.folder, tree.limits)
        channel.send(GO)
        with suppress(BrokenPipeError):  # the runtime has gone: watching finds that too
            socket.send_fds(call, [b"{}"], [each.fileno() for each in listeners])
    try:
        why = tree.watch(call)
    finally:
        tree.end()
    failure = channel.recv(_MAX_STATUS).decode(errors="replace")
    if failure:
        return {"infra": failure}
    return {"code": tree.code, "why": why, "cpu_seconds": tree.cpu_seconds(())}


class _Tree:
    """All processes of one call."""

    def __init__(self, main: int, *, is_alone: bool, proc: int, folder: int, limits: Limits) -> None:
        self._main, self._is_alone, self._proc, self.folder, self.limits = main, is_alone, proc, folder, limits
        self._own_pid = int(os.readlink("self", dir_fd=proc))
        """In `proc`: 1 if that shows the call's processes and no others."""
        self._cpu_before = usage.cpu_seconds(proc, ())
        used = usage.disk(proc, folder, 1 << 62, limits.inodes)
        # a call that finds the folder too full may make room
        self._max_disk, self._max_inodes = max(limits.disk_bytes, used[0]), max(limits.inodes, used[1])
        self.code: int | None = None
        """How the main process ended: its exit code, or minus the signal; None while it runs."""

    def cpu_seconds(self, pids: Iterable[int]) -> float:
        """Of the call: what its ended processes have used, and those of `pids`."""
        return usage.cpu_seconds(self._proc, pids) - self._cpu_before

    def watch(self, call: socket.socket) -> str:
        """Wait for the end of the call; why it has to be ended, or nothing if the main process ended by itself."""
        pidfd = os.pidfd_open(self._main)
        try:
            return self._watch(call, pidfd)
        finally:
            os.close(pidfd)

    def _watch(self, call: socket.socket, pidfd: int) -> str:
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
                while True:  # until there is nobody to kill
                    os.kill(-1, signal.SIGKILL)
                    self._reap(0)
            self._reap(0)
            return
        while self._reap(os.WNOHANG):
            for pid in self._pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)

    def _over(self) -> str:
        pids = list(self._pids())
        if usage.memory_bytes(self._proc, pids, self.limits.memory_bytes) > self.limits.memory_bytes:
            return "memory"
        return "cpu" if self.cpu_seconds(pids) > self.limits.cpu_seconds else ""

    def _over_disk(self) -> str:
        used, entries = usage.disk(self._proc, self.folder, self._max_disk, self._max_inodes)
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
        """As `proc` numbers them."""
        if self._own_pid == 1:
            yield from (int(name) for name in usage.listed(self._proc, ".") if name.isdigit() and name != "1")
            return
        parents = [self._own_pid]
        while parents:
            children = _children(self._proc, parents.pop())
            yield from children
            parents += children


def _children(proc: int, pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in usage.listed(proc, f"{pid}/task"):
            found += map(int, usage.read(proc, f"{pid}/task/{thread}/children").split())
    return found
