"""The one-shot contract: one process a call, one JSON line in, one JSON line back.

* standard input is one JSON line, then its end;
* the answer is one JSON line, `{"result": ...}` or `{"error": "..."}`, on the descriptor in AGENTRT_REPLY_FD; without
  one, standard output is the text result;
* standard output and error are captured up to a cap and drained beyond it, so no tool blocks on a full pipe;
* the environment is `PATH`, `HOME` (the episode's folder, also the working directory), `LANG`, `TERM`, `TMPDIR` (of
  this call) and `AGENTRT_REPLY_FD`, nothing else;
* the call ends with its main process, its time limit or cancellation; then everything it started is killed.

There is **no isolation** here: files, network and memory are those of the user. It is for the tools that agentrt ships,
not for code a model wrote. A level of isolation wraps `argv` and ends its own process tree; the contract stays.
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Any, NamedTuple, Self

import anyio
import msgspec
import structlog

from agentrt.core import clock
from agentrt.sandbox.capture import Capture
from agentrt.sandbox.result import Outcome, ToolResult
from agentrt.sandbox.tree import Leftovers

OUTPUT_BYTES = 65_536
"""Of standard output, of standard error, and of the text that a reply makes."""
REPLY_BYTES = 1 << 20
READ_BYTES = 65_536
REAP_SECONDS = 5.0
"""Bound of the tear-down. SIGKILL takes effect in milliseconds, unless the kernel itself hangs."""
KILL_SECONDS = 0.001
"""Between a SIGKILL and the look whether it has worked."""
TIMEOUT_EXIT_CODE = 124

log = structlog.get_logger(__name__)


async def call(
    argv: Sequence[str], request: Any, *, folder: Path, seconds: float, output_bytes: int = OUTPUT_BYTES
) -> ToolResult:
    """Run one call in `folder`. Always gives a result, except for cancellation, which passes after the tear-down."""
    clock.refuse_in_virtual_time("a tool's process")
    started = clock.now()
    try:
        process = _Process(argv, request, folder, output_bytes)
    except OSError as error:
        return ToolResult(outcome="infra", text=f"{argv[0]}: cannot be started: {error.strerror}")
    with process:
        try:
            with anyio.move_on_after(seconds) as limit:
                await process.ended()
        finally:
            await process.tear_down()
        return process.result(timed_out=limit.cancelled_caught, seconds=clock.now() - started)


class _Process:
    """A started program and its pipes. Leaving the scope closes the pipes; `tear_down` comes before."""

    def __init__(self, argv: Sequence[str], request: Any, folder: Path, output_bytes: int) -> None:
        self.captures: dict[int, Capture] = {}
        """What came out of each pipe, by the descriptor it is read from."""
        self.temporary = Path(mkdtemp(prefix="tmp-", dir=folder))
        with ExitStack() as fds, ExitStack() as childs:
            stdin = _memory_file(msgspec.json.encode(request) + b"\n", childs)
            self.stdout, out = self._pipe(output_bytes, fds, childs)
            self.stderr, err = self._pipe(output_bytes, fds, childs)
            self.reply, reply = self._pipe(REPLY_BYTES, fds, childs)
            self.popen = subprocess.Popen(
                argv, stdin=stdin, stdout=out, stderr=err, pass_fds=(reply,), cwd=folder, start_new_session=True,
                env=_environment(folder, self.temporary, reply),
            )  # fmt: skip
            self.pidfd = self._watched(fds)
            self._fds = fds.pop_all()

    def _pipe(self, cap: int, fds: ExitStack, childs: ExitStack) -> tuple[int, int]:
        read, write = os.pipe()
        fds.callback(os.close, read)
        childs.callback(os.close, write)
        os.set_blocking(read, False)
        self.captures[read] = Capture(cap)
        return read, write

    def _watched(self, fds: ExitStack) -> int:
        """A descriptor that is readable when the process has ended."""
        try:
            pidfd = os.pidfd_open(self.popen.pid)
        except OSError:
            self.popen.kill()
            self.popen.wait()
            raise
        fds.callback(os.close, pidfd)
        return pidfd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fds.close()

    async def ended(self) -> None:
        """Read the pipes until the main process ends; others may hold the pipes open longer."""
        async with anyio.create_task_group() as readers:
            for fd in self.captures:
                readers.start_soon(self._read, fd)
            await anyio.wait_readable(self.pidfd)
            readers.cancel_scope.cancel()

    async def tear_down(self) -> None:
        """Kill and reap all that is left of the call, then read what it had written. Shielded, and bounded in time."""
        if self.popen.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
        with anyio.move_on_after(REAP_SECONDS, shield=True) as bound:
            if self.popen.returncode is None:
                await anyio.wait_readable(self.pidfd)
                self.popen.wait()
            left = Leftovers(self.popen.pid, self.temporary)
            while left.kill():  # noqa: ASYNC110 - nothing but looking tells that adopted processes are gone
                await anyio.sleep(KILL_SECONDS)
        if bound.cancelled_caught:
            log.warning("tool_outlives_kill", pid=self.popen.pid, argv=self.popen.args)
        for fd in self.captures:
            while self._read_some(fd):
                pass

    async def _read(self, fd: int) -> None:
        while True:
            await anyio.wait_readable(fd)
            if not self._read_some(fd):
                return

    def _read_some(self, fd: int) -> bool:
        """Read what is there; False at the end, and when there is nothing."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        self.captures[fd].feed(data)
        return bool(data)

    def result(self, *, timed_out: bool, seconds: float) -> ToolResult:
        """The result of the call, after the tear-down."""
        stdout, stderr = self.captures[self.stdout].captured(), self.captures[self.stderr].captured()
        reply = _read_reply(self.captures[self.reply], self.captures[self.stdout])
        code = TIMEOUT_EXIT_CODE if timed_out else self.popen.returncode
        outcome: Outcome = reply.outcome if reply else "ok"
        if code:
            outcome = "timeout" if timed_out else "signal" if code < 0 else "exit_nonzero"
        text, truncated, total_bytes, errors = reply.capture.captured() if reply else stdout
        return ToolResult(
            outcome=outcome, text=text, stderr=stderr.text, exit_code=code, seconds=seconds, truncated=truncated,
            total_bytes=total_bytes, decode_errors=errors + (reply.decode_errors if reply else 0),
        )  # fmt: skip


class _Reply(NamedTuple):
    outcome: Outcome
    capture: Capture
    decode_errors: int


def _read_reply(written: Capture, stdout: Capture) -> _Reply | None:
    """What the tool said on its reply descriptor; None if it said nothing."""
    if not written.total_bytes:
        return None
    line, _, _, errors = written.captured()
    try:
        value = msgspec.json.decode(line, type=dict[str, Any])
        outcome, said = ("tool_error", value["error"]) if "error" in value else ("ok", value["result"])
    except (msgspec.DecodeError, KeyError):
        outcome, said = "tool_error", 'the tool\'s reply is not one JSON line {"result": ...} or {"error": "..."}'
    text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    capture = Capture(stdout.cap)
    capture.feed(text.encode("utf-8", errors="replace"))
    return _Reply("ok" if outcome == "ok" else "tool_error", capture, errors)


def _environment(folder: Path, temporary: Path, reply: int) -> dict[str, str]:
    """The whole environment of a tool: an allow-list."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TMPDIR": str(temporary),
        "AGENTRT_REPLY_FD": str(reply),
    }


def _memory_file(data: bytes, owner: ExitStack) -> int:
    """A descriptor to read `data` from, whatever its length, that `owner` closes: no writer that could block."""
    fd = os.memfd_create("agentrt-request", os.MFD_CLOEXEC)
    owner.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
