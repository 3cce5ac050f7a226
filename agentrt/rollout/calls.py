"""Tool calls: which ones run, how they run, and what the model is told of each.

A call that cannot run (unknown tool, arguments that are no JSON or break the tool's schema) is answered in words and
the episode goes on; nothing is guessed and the calls beside it still run. A call made before runs again, since a tool
may have state. A sandbox that fails is no answer: it raises `SandboxFailure`, for the model must not be blamed for it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import anyio
import msgspec

from agentrt.core import clock
from agentrt.core.errors import SandboxFailure
from agentrt.core.records import CallRecord
from agentrt.env.chat.message import ToolCall
from agentrt.env.tool import Tool
from agentrt.rollout.outlook import Outlook
from agentrt.sandbox.relay import Address
from agentrt.sandbox.reply import Progress
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.terms import Terms

OK = "ok"
UNKNOWN_TOOL, MALFORMED, BAD_ARGUMENTS = "unknown_tool", "malformed", "bad_arguments"
CANCELLED, INFRA = "cancelled", "infra"


class ToolRunner(Protocol):
    """What an episode needs of a sandbox. A context manager; leaving it frees all that its calls used."""

    async def call(
        self,
        argv: Sequence[str],
        request: Any,
        *,
        seconds: float,
        terms: Terms,
        queued: bool = True,
        on_progress: Callable[[Progress], None] | None = None,
        outside: Address | None = None,
    ) -> ToolResult:
        """One call. If it is not `queued`, it needs no place among the tools that run: graders have permits of their own.
        `outside` is the one address that it can reach."""

    def fork(self) -> "ToolRunner":
        """One whose files start as this one's are now, for a fork of the conversation. The caller enters and leaves it."""

    def put(self, files: Mapping[str, str]) -> None:
        """Write texts into the episode's folder, by path, before the first call."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def before(call: ToolCall, tools: Mapping[str, Tool], branch: str, turn: int) -> CallRecord:
    """The record of a call that has not run: a refusal if it cannot run, otherwise as if it were cancelled."""
    if call.error:
        outcome, words = MALFORMED, call.error
    elif call.name not in tools:
        outcome, words = UNKNOWN_TOOL, f"unknown tool {call.name!r}; available: {', '.join(sorted(tools)) or 'none'}"
    else:
        outcome, words = BAD_ARGUMENTS, tools[call.name].refusal(call.arguments)
    outcome, result = (outcome, f"error: {words}") if words else (CANCELLED, "")
    return CallRecord(
        branch=branch, turn=turn, name=call.name, arguments=call.arguments, outcome=outcome, result=result
    )


async def run_calls(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool],
    runner: ToolRunner,
    seconds: float,
    records: list[CallRecord],
    on_eta: Callable[[float], None],
) -> None:
    """Run `calls`, side by side, and put the record of each in its place in `records`.

    `records` holds one entry for each call: that of a refused one stays as it is, and so does that of one that is
    cancelled while it runs. `on_eta` is told in how many seconds they will all be done, when they say so. Raises
    `SandboxFailure`, after all have ended, if one could not be run.
    """
    waiting = [index for index, record in enumerate(records) if record.outcome == CANCELLED]
    outlook = Outlook(clock.now(), seconds)

    def hear(index: int, progress: Progress) -> None:
        eta = outlook.hear(index, progress, clock.now())
        if eta is not None:
            on_eta(eta)

    async def run(index: int) -> None:
        call, tool = calls[index], tools[calls[index].name]
        allowed = min(seconds, tool.terms.limits.wall_seconds or seconds)
        result = await runner.call(
            tool.argv, call.arguments, seconds=allowed, terms=tool.terms, on_progress=partial(hear, index)
        )
        outlook.forget(index)
        records[index] = _after(records[index], result, allowed)

    if len(waiting) == 1:  # the usual case needs no task group
        await run(waiting[0])
    else:
        async with anyio.create_task_group() as side_by_side:
            for index in waiting:
                side_by_side.start_soon(run, index)
    for record in records:
        if record.outcome == INFRA:
            raise SandboxFailure(record.result)


def _after(record: CallRecord, result: ToolResult, seconds: float) -> CallRecord:
    return msgspec.structs.replace(
        record, outcome=result.outcome, result=_shown(result, seconds), seconds=result.seconds,
        queue_seconds=result.queue_seconds, truncated=result.truncated, total_bytes=result.total_bytes,
        decode_errors=result.decode_errors, isolation=result.isolation,
    )  # fmt: skip


def _shown(result: ToolResult, seconds: float) -> str:
    """What the model reads: the result, and after a failure also why and what the tool said on standard error."""
    match result.outcome:
        case "ok" | "infra":
            return result.text
        case "tool_error" | "output":
            return f"error: {result.text}"
        case "timeout":
            end = f"timed out after {seconds:g} s"
        case "signal":
            end = f"ended by signal {-(result.exit_code or 0)}"
        case "exit_nonzero":
            end = f"exit code {result.exit_code}"
        case limit:
            end = f"ended by its {limit} limit"
    return "\n".join(part.rstrip("\n") for part in (result.text, result.stderr, f"error: {end}") if part)
