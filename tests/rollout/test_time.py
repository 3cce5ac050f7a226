"""What takes hours, in virtual time: limits by the clock, stuck code, slow tools and graders."""

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from agentrt import Environment, Limits, Message, StopReason, Task, reward
from agentrt.core import clock
from agentrt.env.chat.message import Turn
from agentrt.env.environment import Agent, Episode
from agentrt.rollout.play import run_episode
from agentrt.testing import Answer, FakeSandbox, ScriptedEngine, called, fake_tool, said, stage

pytestmark = pytest.mark.anyio
TASK = Task("t", (Message("user", "q"),))
HOUR = 3600.0


@pytest.fixture
def anyio_backend(virtual_time: Any) -> Any:
    return virtual_time


class Waiting(Environment):
    """Asks its tool, once a turn."""

    tools = (fake_tool("wait"),)

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        yield TASK

    @reward(weight=1.0)
    async def one(self, episode: Episode) -> float:
        return 1.0


def waiting(seconds: float) -> FakeSandbox:
    async def wait(arguments: Any) -> str:
        await anyio.sleep(seconds)
        return "done"

    return FakeSandbox({"wait": wait})


async def test_an_hour_long_tool() -> None:
    limits = Limits(wall_seconds=3 * HOUR, tool_seconds=2 * HOUR)
    engine = ScriptedEngine([Answer(said(called("wait")), seconds=60), said("ok")])
    record = await run_episode(stage(Waiting(), engine, sandbox=waiting(HOUR), limits=limits), TASK)
    assert record.stop_reason is StopReason.COMPLETED
    assert record.calls[0].seconds == HOUR
    assert record.timing == pytest.approx(
        {"queue": 0.0, "prefill": 0.0, "decode": 60.0, "tools": HOUR, "scoring": 0.0, "total": HOUR + 60}
    )


async def test_a_tool_over_its_limit_is_told_to_the_model() -> None:
    engine = ScriptedEngine([said(called("wait")), said("ok")])
    limits = Limits(wall_seconds=HOUR, tool_seconds=20)
    record = await run_episode(stage(Waiting(), engine, sandbox=waiting(HOUR), limits=limits), TASK)
    assert (record.calls[0].outcome, record.calls[0].result) == ("timeout", "error: timed out after 20 s")
    assert (record.stop_reason, record.timing["tools"]) == (StopReason.COMPLETED, 20.0)


async def test_a_logprob_that_is_not_finite_fails_an_episode_that_a_limit_ended() -> None:
    engine = ScriptedEngine([Answer(said("yes"), logprobs=[float("nan")] * 4, seconds=40)])
    record = await run_episode(stage(Waiting(), engine, limits=Limits(wall_seconds=25)), TASK)
    assert record.error is not None
    assert (record.error.boundary, record.error.type, sum(record.branches[0].mask)) == ("engine", "EngineFailure", 2)


async def test_the_wall_limit_keeps_the_partial_trajectory_and_names_the_stuck_line() -> None:
    class Stuck(Waiting):
        async def step(self, episode: Episode, turn: Turn) -> Sequence[Message] | None:
            await anyio.sleep(3 * HOUR)  # the stuck line
            return None

    engine = ScriptedEngine([said("hello")])
    setup = stage(Stuck(), engine, limits=Limits(wall_seconds=HOUR))
    with capture_logs() as logs:
        record = await run_episode(setup, TASK)
    assert (record.status, record.stop_reason, record.truncated) == ("ok", StopReason.WALL_TIME, True)
    assert (sum(record.branches[0].mask), record.reward, record.timing["total"]) == (6, 1.0, HOUR)
    (event,) = logs
    assert event["event"] == "episode_deadline"
    assert "# the stuck line" in event["stuck_at"]
    assert engine.num_sessions == 0


async def test_a_turn_cut_by_the_wall_limit_keeps_what_was_sampled() -> None:
    engine = ScriptedEngine([Answer(said("123456789"), seconds=100)])
    record = await run_episode(stage(Waiting(), engine, limits=Limits(wall_seconds=45)), TASK)
    (branch,) = record.branches
    assert record.stop_reason is StopReason.WALL_TIME
    (turn,) = branch.turns
    assert (turn.finish_reason, turn.end - turn.start, sum(branch.mask)) == ("abort", 4, 4)
    assert list(branch.token_ids[turn.start :]) == [*b"1234"]


async def test_a_turn_over_its_own_limit_is_the_engines_failure() -> None:
    engine = ScriptedEngine([Answer(said("123456789"), seconds=100)])
    record = await run_episode(stage(Waiting(), engine, limits=Limits(turn_seconds=45)), TASK)
    assert record.error is not None
    assert (record.status, record.error.boundary, record.reward) == ("error", "engine", None)
    assert "limits.turn_seconds (45 s)" in record.error.message
    assert list(record.branches[0].token_ids[record.branches[0].turns[0].start :]) == [*b"1234"]


async def test_a_call_in_flight_at_the_wall_limit_is_recorded() -> None:
    sandbox = waiting(9 * HOUR)
    engine = ScriptedEngine([said(called("wait", '{"a": 1}') + called("wait", '{"a": 2}'))])
    limits = Limits(wall_seconds=HOUR, tool_seconds=HOUR)
    record = await run_episode(stage(Waiting(), engine, sandbox=sandbox, limits=limits), TASK)
    assert record.stop_reason is StopReason.WALL_TIME
    assert [call.outcome for call in record.calls] == ["cancelled", "cancelled"]
    assert [call.arguments for call in record.calls] == [{"a": 1}, {"a": 2}]
    assert sandbox.num_open == 0


async def test_calls_of_a_turn_run_side_by_side_and_are_answered_in_order() -> None:
    async def wait(arguments: Any) -> str:
        await anyio.sleep(arguments["s"])
        return str(arguments["s"])

    engine = ScriptedEngine([said("".join(called("wait", f'{{"s": {s}}}') for s in (3, 1, 2))), said("ok")])
    record = await run_episode(stage(Waiting(), engine, sandbox=FakeSandbox({"wait": wait})), TASK)
    assert [call.result for call in record.calls] == ["3", "1", "2"]
    assert record.timing["tools"] == 3.0


async def test_c23_a_stuck_grader_is_null_with_its_reason() -> None:
    class StuckGrader(Waiting):
        @reward(weight=1.0)
        async def two(self, episode: Episode) -> float:
            await anyio.sleep_forever()
            return 0.0

    setup = stage(StuckGrader(), ScriptedEngine([said("ok")]), limits=Limits(score_seconds=5))
    record = await run_episode(setup, TASK)
    assert (record.status, record.reward, record.reward_reason) == ("ok", None, "score_timeout")
    assert (record.rewards["one"].score, record.rewards["two"].score) == (1.0, None)
    assert record.timing["scoring"] == 5.0


async def test_no_progress_ends_an_episode_that_repeats_itself() -> None:
    sandbox = waiting(1)
    engine = ScriptedEngine([said(called("wait"))] * 9)
    record = await run_episode(stage(Waiting(), engine, sandbox=sandbox, limits=Limits(max_idle_turns=3)), TASK)
    assert record.stop_reason is StopReason.NO_PROGRESS
    assert (record.metrics["turns"], len(sandbox.calls)) == (4.0, 4)


async def test_max_tool_calls() -> None:
    sandbox = waiting(1)
    engine = ScriptedEngine([said(called("wait", f'{{"n": {n}}}')) for n in range(9)])
    record = await run_episode(stage(Waiting(), engine, sandbox=sandbox, limits=Limits(max_tool_calls=2)), TASK)
    assert (record.stop_reason, len(sandbox.calls), record.metrics["turns"]) == (StopReason.TOOL_CALLS, 2, 3.0)


async def test_an_end_is_not_caught_by_except_exception() -> None:
    class Stubborn(Waiting):
        async def rollout(self, task: Task, agent: Agent) -> None:
            while True:
                with suppress(Exception):
                    await agent.sample(Message("user", "more"))

    record = await run_episode(stage(Stubborn(), ScriptedEngine([said("a")] * 9), limits=Limits(max_turns=2)), TASK)
    assert (record.status, record.stop_reason) == ("ok", StopReason.MAX_TURNS)


async def test_an_end_inside_a_task_group_is_an_end() -> None:
    class Grouped(Waiting):
        async def rollout(self, task: Task, agent: Agent) -> None:
            async with anyio.create_task_group() as group:
                for name in ("a", "b", "c"):
                    group.start_soon(agent.episode.agent(name, Message("user", name)).sample)

    record = await run_episode(stage(Grouped(), ScriptedEngine([said("a")]), limits=Limits(max_turns=2)), TASK)
    assert (record.status, record.stop_reason) == ("ok", StopReason.MAX_TURNS)


async def test_a_deadline_of_the_environments_own() -> None:
    class Patient(Waiting):
        async def rollout(self, task: Task, agent: Agent) -> None:
            with anyio.move_on_after(50):
                await agent.sample()
            await agent.sample(Message("user", "in short?"))

    engine = ScriptedEngine([Answer(said("123456789"), seconds=100), said("yes")])
    record = await run_episode(stage(Patient(), engine), TASK)
    (branch,) = record.branches
    assert [turn.finish_reason for turn in branch.turns] == ["abort", "stop"]
    assert sum(branch.mask) == sum(turn.end - turn.start for turn in branch.turns) == 8
    assert branch.token_ids[branch.turns[0].end] == 257  # the cut turn is ended by an observed id


async def test_a_thousand_episodes_of_a_day_each() -> None:
    limits = Limits(wall_seconds=48 * HOUR, tool_seconds=30 * HOUR)
    engine = ScriptedEngine([said(called("wait")), said("ok")])
    setup = stage(Waiting(), engine, sandbox=waiting(24 * HOUR), limits=limits)
    started = clock.now()
    async with anyio.create_task_group() as episodes:
        for member in range(1000):
            episodes.start_soon(lambda member=member: run_episode(setup, TASK, member=member))
    assert clock.now() - started == 24 * HOUR
    assert engine.num_sessions == 0
