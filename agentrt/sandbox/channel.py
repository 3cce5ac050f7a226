"""The one-shot contract: one process a call, one JSON line in, one JSON line back.

* standard input is one JSON line, then its end;
* the answer is one JSON line, `{"result": ...}` or `{"error": "..."}`, on the descriptor in AGENTRT_REPLY_FD, after any
  number of `{"progress": ..., "eta_s": ...}` lines; without an answer, standard output is the text result;
* standard output and error are captured up to a cap and drained beyond it, so no tool blocks on a full pipe;
* the environment is `PATH`, `HOME` (the episode's folder, also the working directory), `LANG`, `TERM`, `TMPDIR`,
  `AGENTRT_REPLY_FD` and what the tool's terms name, nothing else;
* the call ends with its main process, a limit or cancellation; then everything it started is killed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec

from agentrt.core import clock
from agentrt.sandbox.capture import Capture
from agentrt.sandbox.inside.job import Job, Limits
from agentrt.sandbox.process import Process, Status, sealed_file
from agentrt.sandbox.relay import Address, relay
from agentrt.sandbox.reply import Progress, Said
from agentrt.sandbox.result import Outcome, ToolResult
from agentrt.sandbox.terms import Terms, ToolLimits
from agentrt.sandbox.zygote import Zygote

TIMEOUT_EXIT_CODE = 124
_REPLY_FD = 3
_LIMITS: dict[str, Outcome] = {"cpu": "cpu", "memory": "memory", "disk": "disk"}


def make_job(argv: Sequence[str], folder: str, home: str, temporary: str, terms: Terms, port: int) -> Job:
    """What the zygote is sent."""
    limits, mega = terms.limits, 1 << 20
    environment = terms.environment | {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", "TERM": "dumb", "TMPDIR": temporary,
        "AGENTRT_REPLY_FD": str(_REPLY_FD),
    }  # fmt: skip
    return Job(
        [*argv], folder, environment,
        Limits(
            cpu_seconds=limits.cpu_seconds, memory_bytes=limits.memory_mb * mega,
            address_bytes=(limits.address_space_mb or 0) * mega, processes=limits.processes, files=limits.files,
            file_bytes=limits.file_mb * mega, disk_bytes=limits.disk_mb * mega, inodes=limits.inodes,
            tmp_bytes=limits.tmp_mb * mega,
        ),
        port,
    )  # fmt: skip


async def call(
    start: Callable[[], tuple[Zygote, Job]],
    request: Any,
    *,
    seconds: float,
    limits: ToolLimits,
    on_progress: Callable[[Progress], None] | None = None,
    outside: Address | None = None,
) -> ToolResult:
    """Run one call. Always gives a result, except for cancellation, which passes after the tear-down.

    `start` makes what it needs: the zygote and the job. If nothing came of that, it is done once again.
    """
    clock.refuse_in_virtual_time("a tool's process")
    data = msgspec.json.encode(request) + b"\n"
    for is_last in (False, True):
        try:
            zygote, job = start()
        except OSError as error:
            return ToolResult(outcome="infra", text=f"no zygote can be started: {error}")
        with Process(limits.output_bytes, limits.reply_bytes, on_progress) as process:
            try:
                await process.start(zygote, job, sealed_file(data), limits.start_seconds)
                started = clock.now()
                with anyio.move_on_after(seconds) as limit:
                    await _run(process, outside)
            finally:
                await process.tear_down()
            if process.is_there or is_last:
                said = process.reply.said()
                return result(process, said, is_late=limit.cancelled_caught, seconds=clock.now() - started)
    raise AssertionError("the last attempt has returned")


async def _run(process: Process, outside: Address | None) -> None:
    """Until it has ended; meanwhile the one address outside can be reached."""
    listening = process.take_listening()
    if listening is None or outside is None:
        await process.read_until()
        return
    async with anyio.create_task_group() as relaying:
        relaying.start_soon(relay, listening, outside)
        await process.read_until()
        relaying.cancel_scope.cancel()


def result(process: Process, said: Said | None, *, is_late: bool, seconds: float) -> ToolResult:
    """The result of a call whose process has ended."""
    status = process.status or Status(infra="the process has not ended")
    if status.infra:
        return ToolResult(outcome="infra", text=status.infra)
    outcome: Outcome = said.outcome if said else "ok"
    code = TIMEOUT_EXIT_CODE if is_late else status.code
    if status.why in _LIMITS:
        outcome = _LIMITS[status.why]
    elif code:
        outcome = "timeout" if is_late else "signal" if code < 0 else "exit_nonzero"
    return answered(process, said, outcome, code=code, seconds=seconds, cpu_seconds=status.cpu_seconds)


def answered(
    process: Process, said: Said | None, outcome: Outcome, *, code: int | None, seconds: float, cpu_seconds: float = 0.0
) -> ToolResult:
    """What the tool said, or wrote to standard output if it said nothing, cut to the cap."""
    stdout, errors = process.stdout, 0
    if said is not None and said.text is not None:
        stdout, errors = Capture(process.stdout.cap), said.decode_errors
        stdout.feed(said.text.encode("utf-8", errors="replace"))
    text, truncated, total_bytes, more = stdout.captured()
    return ToolResult(
        outcome=outcome, text=text, stderr=process.stderr.captured().text, exit_code=code, seconds=seconds,
        cpu_seconds=cpu_seconds, truncated=truncated, total_bytes=total_bytes, decode_errors=errors + more,
    )  # fmt: skip
