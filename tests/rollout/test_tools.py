"""The loop with real processes, and with sandboxes that fail."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from agentrt import Environment, Limits, Message, StopReason, Task, reward, tool
from agentrt.core.records import EpisodeRecord, decode, encode
from agentrt.env.chat.message import ToolCall
from agentrt.env.environment import Agent, Episode
from agentrt.rollout.play import run_episode
from agentrt.rollout.setup import Setup
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.reply import Progress
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox
from agentrt.testing import FakeSandbox, ScriptedEngine, called, fake_tool, said, stage

pytestmark = pytest.mark.anyio
TASK = Task("t", (Message("user", "q"),))


class Shipped(Environment):
    tools = (tool("calculator"), tool("kv"))

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        yield TASK

    @reward
    async def one(self, episode: Episode) -> float:
        return 1.0


def with_processes(environment: Environment, *turns: str) -> Setup:
    setup = stage(environment, ScriptedEngine([said(turn) for turn in turns]))
    permits = Permits(2)
    setup.sandboxes = lambda: Sandbox(permits)
    return setup


async def test_the_shipped_tools_run() -> None:
    setup = with_processes(
        Shipped(),
        called("calculator", '{"expression": "2 * (3 + 4)"}') + called("calculator", '{"expression": "1 / 0"}'),
        called("kv", '{"op": "set", "key": "a", "value": "x"}'),
        called("kv", '{"op": "get", "key": "a"}'),
        "done",
    )
    records: list[EpisodeRecord] = []

    async def one(member: int) -> None:
        records.append(await run_episode(setup, TASK, member=member))

    async with anyio.create_task_group() as episodes:
        episodes.start_soon(one, 0)
        episodes.start_soon(one, 1)
    for record in records:
        assert [call.outcome for call in record.calls] == ["ok", "tool_error", "ok", "ok"]
        assert [call.result for call in record.calls] == ["14", "error: division by zero", "ok", "x"]
        assert (record.reward, record.stop_reason) == (1.0, StopReason.COMPLETED)


async def test_what_one_episode_stores_another_does_not_see() -> None:
    storing = with_processes(Shipped(), called("kv", '{"op": "set", "key": "a", "value": "x"}'), "done")
    listing = with_processes(Shipped(), called("kv", '{"op": "list"}'), "done")
    first, second = await run_episode(storing, TASK), await run_episode(listing, TASK)
    assert first.calls[0].outcome == "ok"
    assert "a" not in second.calls[0].result


async def test_a_forked_agent_has_files_of_its_own() -> None:
    class Forking(Shipped):
        async def rollout(self, task: Task, agent: Agent) -> None:
            await agent.sample()
            await agent.call(ToolCall("kv", {"op": "set", "key": "a", "value": "x"}))
            fork = agent.fork("fork")
            await agent.call(ToolCall("kv", {"op": "set", "key": "b", "value": "x"}))
            await fork.call(ToolCall("kv", {"op": "list"}))

    record = await run_episode(with_processes(Forking(), "go"), TASK)
    assert [call.result for call in record.calls] == ["ok", "ok", "a"]
    assert [(call.branch, call.turn) for call in record.calls] == [("main", 0), ("main", 0), ("fork", -1)]


async def test_c17_no_secret_is_in_the_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shell(Shipped):
        tools = (tool("shell"),)

    monkeypatch.setenv("MY_VENDOR_THING", "s3cr3t")
    command = called("shell", '{"command": "env; cat /proc/$PPID/environ /proc/1/environ; echo HOME=$HOME"}')
    record = await run_episode(with_processes(Shell(), command, "done"), TASK)
    assert "HOME=" in record.calls[0].result
    assert str(Path.home()) + "\n" not in record.calls[0].result
    assert b"s3cr3t" not in encode(record)


class WithTool(Shipped):
    tools = (fake_tool("f"),)


async def test_a_sandbox_that_fails_is_no_answer_and_no_reward() -> None:
    async def broken(arguments: Any) -> ToolResult:
        return ToolResult(outcome="infra", text="no process could be started")

    engine = ScriptedEngine([said(called("f") + called("f")), said("never")])
    record = await run_episode(stage(WithTool(), engine, sandbox=FakeSandbox({"f": broken})), TASK)
    assert record.error is not None
    assert (record.status, record.error.boundary, record.error.type) == ("error", "sandbox", "SandboxFailure")
    assert (record.reward, len(engine.requests), engine.num_sessions) == (None, 1, 0)
    assert sum(record.branches[0].mask) == len(said(called("f") + called("f")))


async def test_a_sandbox_that_cannot_be_opened() -> None:
    class Closed(FakeSandbox):
        def __enter__(self) -> "Closed":
            raise OSError(28, "No space left on device")

    record = await run_episode(stage(WithTool(), ScriptedEngine([said("x")]), sandbox=Closed({})), TASK)
    assert record.error is not None
    assert (record.status, record.error.boundary, record.branches) == ("error", "sandbox", [])
    assert "No space left on device" in record.error.message


async def test_the_engine_hears_when_a_turns_calls_will_be_done() -> None:
    class Telling(FakeSandbox):
        async def call(self, argv: Sequence[str], request: Any, **rest: Any) -> ToolResult:
            for eta in request["etas"]:
                rest["on_progress"](Progress(None, eta))
            return await super().call(argv, request, **rest)

    async def done(arguments: Any) -> str:
        return "done"

    engine = ScriptedEngine([said(called("f", '{"etas": [7, 8]}')), said(called("f", '{"etas": []}')), said("x")])
    record = await run_episode(stage(WithTool(), engine, sandbox=Telling({"f": done})), TASK)
    assert [call.outcome for call in record.calls] == ["ok", "ok"]
    (eta,) = engine.etas  # the second word came at once
    assert 6.9 <= eta <= 7.0


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (ToolResult(outcome="ok", text="14"), "14"),
        (ToolResult(outcome="tool_error", text="no such key"), "error: no such key"),
        (ToolResult(outcome="exit_nonzero", text="out\n", stderr="err\n", exit_code=3), "out\nerr\nerror: exit code 3"),
        (ToolResult(outcome="signal", text="", exit_code=-11), "error: ended by signal 11"),
        (ToolResult(outcome="timeout", text="part\n", exit_code=124), "part\nerror: timed out after 20 s"),
    ],
)
async def test_what_the_model_is_told(result: ToolResult, shown: str) -> None:
    async def given(arguments: Any) -> ToolResult:
        return result

    engine = ScriptedEngine([said(called("f")), said("x")])
    record = await run_episode(stage(WithTool(), engine, sandbox=FakeSandbox({"f": given})), TASK)
    assert record.messages[2]["content"] == shown
    assert record.calls[0].outcome == result.outcome


async def test_failing_calls_are_no_progress() -> None:
    engine = ScriptedEngine([said(called("g", f'{{"n": {n}}}')) for n in range(9)])
    record = await run_episode(stage(WithTool(), engine, limits=Limits(max_idle_turns=2)), TASK)
    assert (record.stop_reason, record.metrics["turns"]) == (StopReason.NO_PROGRESS, 2.0)


async def test_a_reward_cannot_go_on_with_the_episode() -> None:
    class Curious(WithTool):
        @reward
        async def one(self, episode: Episode) -> float:
            await episode.main.sample(Message("user", "again"))
            return 1.0

        @reward
        async def two(self, episode: Episode) -> float:
            episode.agent("judge", Message("user", "good?"))
            return 1.0

        @reward
        async def three(self, episode: Episode) -> float:
            episode.stop(StopReason.MAX_TURNS)

    engine = ScriptedEngine([said("x")] * 3)
    record = await run_episode(stage(Curious(), engine), TASK)
    assert (record.status, record.reward, record.stop_reason) == ("ok", None, StopReason.COMPLETED)
    assert [score.score for score in record.rewards.values()] == [None, None, None]
    assert record.reward_reason is not None
    assert record.reward_reason.startswith("reward_raised: RuntimeError: the episode is over")
    assert (len(engine.requests), engine.num_sessions) == (1, 0)


@pytest.mark.parametrize(
    ("does", "error"),
    [
        (lambda agent: agent.sample(Message("user", "half \ud800")), "UnicodeEncodeError"),
        (lambda agent: agent.sample(Message("tool", "x", name="half \ud800")), "UnicodeEncodeError"),
        (lambda agent: agent.sample(Message("assistant", "x", calls=(ToolCall("f", {"a": object()}),))), "TypeError"),
        (lambda agent: agent.call(ToolCall("half \ud800")), "UnicodeEncodeError"),
        (lambda agent: agent.call(ToolCall("f", {"a": object()})), "TypeError"),
    ],
)
async def test_what_cannot_be_stored_ends_the_episode_and_not_the_run(does: Any, error: str) -> None:
    class Odd(WithTool):
        async def rollout(self, task: Task, agent: Agent) -> None:
            await does(agent)

    record = await run_episode(stage(Odd(), ScriptedEngine([said("x")])), TASK)
    assert record.error is not None
    assert (record.status, record.error.type) == ("error", error)
    assert [message["content"] for message in record.messages] == ["q"]
    assert decode(encode(record), EpisodeRecord) == record


async def test_the_name_of_a_metric_is_text() -> None:
    class Odd(WithTool):
        async def rollout(self, task: Task, agent: Agent) -> None:
            names = cast(dict[Any, float], agent.episode.metrics)
            names |= {"half \ud800": 1.0, ("a", 2): 2.0, "none": float("nan")}

    record = await run_episode(stage(Odd(), ScriptedEngine([])), TASK)
    assert record.metrics == {"turns": 0.0, "tool_calls": 0.0, "half ?": 1.0, "('a', 2)": 2.0}


async def test_turns_without_calls_are_not_idle_though_the_environment_runs_none() -> None:
    class Talking(WithTool):
        async def rollout(self, task: Task, agent: Agent) -> None:
            turn = await agent.sample()
            for _ in range(3):
                assert await agent.call(*turn.calls) == []
                turn = await agent.sample(Message("user", "go on"))

    record = await run_episode(stage(Talking(), ScriptedEngine([said("x")] * 4), limits=Limits(max_idle_turns=2)), TASK)
    assert (record.stop_reason, len(record.branches[0].turns)) == (StopReason.COMPLETED, 4)


async def test_what_was_said_cannot_be_written_over() -> None:
    """It would be in the record and not in the ids."""

    class Writing(WithTool):
        async def rollout(self, task: Task, agent: Agent) -> None:
            await agent.sample()
            cast(list[Message], agent.messages).append(Message("user", "unheard"))

    record = await run_episode(stage(Writing(), ScriptedEngine([said("x")])), TASK)
    assert record.error is not None
    assert record.error.type == "AttributeError"
    assert [message["content"] for message in record.messages] == ["q", "x"]
