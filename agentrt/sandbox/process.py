"""`Process`: one sandboxed process seen from the runtime: its pipes, its supervisor's word, its end.

The runtime forks nothing and waits for no pid: a zygote forks, a supervisor waits, and both are only sockets here.
"""

import fcntl
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import anyio
import msgspec
import structlog

from agentrt.sandbox.capture import Capture
from agentrt.sandbox.inside.job import Job
from agentrt.sandbox.reply import Progress, Reply
from agentrt.sandbox.zygote import Zygote

READ_BYTES = 65_536
READS_A_TURN = 8
"""Of a full pipe whose bytes are only kept, before others have their turn: half a millisecond of the event loop. What is
taken apart is read once: it may be lines of one byte."""
TEAR_DOWN_SECONDS = 5.0
"""Its bound. A supervisor ends a call in milliseconds, unless the kernel itself hangs."""
_FULL_PIPE_READS = 16
"""Enough for the largest pipe that a tool can make of the one it was given."""
_MAX_STATUS = 16_384
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

log = structlog.get_logger(__name__)


class Status(msgspec.Struct, frozen=True):
    """What a supervisor says of a call at its end."""

    code: int | None = None
    """Exit code, or minus the signal."""
    why: str = ""
    """The limit that ended it, `cancelled`, or nothing."""
    infra: str = ""
    """Why it could not be run at all, or what happened to its supervisor."""
    cpu_seconds: float = 0.0


class Process:
    """A context manager; leaving it closes all descriptors. `tear_down` comes before.

    Standard output is kept, unless somebody else is to take it.
    """

    def __init__(
        self,
        output_bytes: int,
        reply_bytes: int,
        on_progress: Callable[[Progress], None] | None = None,
        take_stdout: Callable[[bytes], None] | None = None,
    ) -> None:
        self.stdout, self.stderr = Capture(output_bytes), Capture(output_bytes)
        self.reply = Reply(reply_bytes, on_progress)
        self._take_stdout = take_stdout or self._feed_stdout
        self.status: Status | None = None
        """None until the process and everything it started have ended."""
        self.is_there = False
        """It has started, however it went on."""
        self._listening: socket.socket | None = None

    def __enter__(self) -> Self:
        with ExitStack() as ours, ExitStack() as theirs:
            self._call, call = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(self._call)
            theirs.enter_context(call)
            self._call.setblocking(False)
            self._events = ours.enter_context(select.epoll())
            """Everything to wait for, as one descriptor."""
            self._events.register(self._call, select.EPOLLIN)
            self._feeds: dict[int, Callable[[bytes], None]] = {}
            """The pipes that have not ended, and what takes their bytes."""
            self._kept = (self._feed_stdout, self._feed_stderr)
            self._handed = [call.fileno()]
            for feed in (self._take_stdout, self._feed_stderr, self.reply.feed):
                read, write = os.pipe()
                ours.callback(os.close, read)
                theirs.callback(os.close, write)
                os.set_blocking(read, False)
                self._feeds[read] = feed
                self._events.register(read, select.EPOLLIN)
                self._handed.append(write)
            self._ours, self._theirs = ours.pop_all(), theirs.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._theirs.close()
        self._ours.close()
        if self._listening is not None:
            self._listening.close()

    def take_listening(self) -> socket.socket | None:
        """The socket that listens at the port of a process that has one and has started. The caller's from now on."""
        listening, self._listening = self._listening, None
        return listening

    def forget(self) -> None:
        """Start new captures: what was written is another call's."""
        self.stdout, self.stderr = Capture(self.stdout.cap), Capture(self.stderr.cap)

    def _feed_stdout(self, data: bytes) -> None:
        self.stdout.feed(data)

    def _feed_stderr(self, data: bytes) -> None:
        self.stderr.feed(data)

    async def start(self, zygote: Zygote, job: Job, stdin: int, seconds: float) -> None:
        """Start it and wait until it is there; if that fails, `status` says why. Takes `stdin` for itself."""
        self._zygote = zygote
        self._theirs.callback(os.close, stdin)
        call, *outputs = self._handed
        with anyio.move_on_after(seconds) as limit:
            try:
                for fd in (stdin, *outputs):
                    zygote.give(fd)
                await zygote.start(job, [call, stdin, *outputs])
            except OSError as error:
                self.status = Status(infra=f"the zygote takes no call: {error}")
                return
            finally:
                self._theirs.close()
            await self._hear()
        if limit.cancelled_caught:
            self.status = Status(infra=f"it did not start within {seconds:g} s")

    def has_ended(self) -> bool:
        """Whether it has, by now."""
        if self.status is None:
            self._take_word()
        return self.status is not None

    async def read_until(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Read the pipes until the process has ended, or what was read is enough."""
        while self.status is None and not is_enough():
            await anyio.wait_readable(self._events.fileno())
            for fd, _ in self._events.poll(0):
                self._serve(fd)

    async def tear_down(self) -> None:
        """End all that is left of it, then read what it had written. Shielded, and bounded in time."""
        if not (self.is_there or self._zygote.is_ready):
            return  # imports may take minutes; should it start after them, its supervisor finds nobody here and ends it
        if self.status is None:
            self._call.shutdown(socket.SHUT_WR)
            with anyio.move_on_after(TEAR_DOWN_SECONDS, shield=True) as bound:
                while self.status is None:
                    await self._hear()
            if bound.cancelled_caught:
                log.warning("tool_outlives_kill", action="its zygote and all calls of that are killed")
                self._zygote.kill()
                self.status = Status(infra="the sandbox did not end in time")
        self.drain()

    def drain(self) -> None:
        """Read what is in the pipes."""
        for fd in list(self._feeds):
            for _ in range(_FULL_PIPE_READS):
                if not self._read_some(fd):
                    break

    def end(self) -> None:
        """End it and wait for that, blocking, milliseconds as a rule: for owners that cannot await."""
        self._call.shutdown(socket.SHUT_WR)
        word = select.poll()  # not select.select, which knows no descriptor above 1023
        word.register(self._call, select.POLLIN)
        deadline = time.monotonic() + TEAR_DOWN_SECONDS
        while self.status is None and (left := deadline - time.monotonic()) > 0:
            if word.poll(left * 1000):
                self._take_word()
        if self.status is None:
            self._zygote.kill()

    async def _hear(self) -> None:
        """Wait for the supervisor's next word: that the process is there, or how it ended."""
        await anyio.wait_readable(self._call)
        self._take_word()

    def _take_word(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._call, _MAX_STATUS, 1)
        except BlockingIOError:
            return
        except OSError as error:
            message, fds = msgspec.json.encode(Status(infra=f"the supervisor is gone: {error.strerror}")), []
        if fds:
            self._listening = socket.socket(fileno=fds[0])
        self._zygote.is_ready |= bool(message)
        self._zygote.takes_calls &= bool(message) or self.is_there
        if message == b"{}":
            self.is_there = True
        else:
            self.status = msgspec.json.decode(message, type=Status) if message else Status(infra="the zygote is gone")

    def _serve(self, fd: int) -> None:
        if fd == self._call.fileno():
            self._take_word()
            return
        for _ in range(READS_A_TURN if self._feeds[fd] in self._kept else 1):
            if not self._read_some(fd):
                break

    def _read_some(self, fd: int) -> bool:
        """Read what is there; False at the end, and when there is nothing."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._events.unregister(fd)
            del self._feeds[fd]
            return False
        self._feeds[fd](data)
        return True


def sealed_file(data: bytes) -> int:
    """A descriptor to read `data` from, whatever its length: no writer that could block, and no reader can grow it."""
    fd = os.memfd_create("agentrt-request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd
