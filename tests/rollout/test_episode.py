"""One episode against a scripted engine: what ends it, what it leaves, whose failure it was."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import pytest

from agentrt import Environment, Limits, Message, StopReason, Task, metric, reward
from agentrt.core import seeds
from agentrt.core.records import EpisodeRecord, Rewrite, decode, encode, joined
from agentrt.core.tokens import Floats
from agentrt.env.chat.message import ToolCall, Turn
from agentrt.env.environment import Agent, Episode
from agentrt.rollout.episode import EpisodeEnd
from agentrt.rollout.play import run_episode
from agentrt.testing import (
    Answer,
    FakeSandbox,
    ScriptedEngine,
    byte_tokenizer,
    called,
    fake_tool,
    said,
    stage,
)

pytestmark = pytest.mark.anyio
TASK = Task("t", (Message("user", "q"),))
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}


class Plain(Environment):
    """Ends with the first turn that has no call; reward 1 for the answer `yes`."""

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        yield TASK

    @reward(weight=1.0)
    async def is_yes(self, episode: Episode) -> float:
        return float(episode.answer == "yes")


async def add(arguments: dict[str, Any]) -> str:
    return str(arguments["a"] + arguments["b"])


async def search(arguments: dict[str, Any]) -> str:
    return f"found {arguments['q']}"


class WithTools(Plain):
    tools = (fake_tool("add", NUMBERS), fake_tool("search"))


def sampled(record: EpisodeRecord) -> int:
    return sum(sum(branch.mask) for branch in record.branches)


async def test_a_plain_episode() -> None:
    engine = ScriptedEngine([Answer(said("yes"), logprobs=[-0.1, -0.2, -0.3, -0.4])])
    record = await run_episode(stage(Plain(), engine, seed=5), TASK, member=2, attempt=1)
    (branch,) = record.branches
    prompt = [256, *b"user\nq", 257, *b"\n", 256, *b"assistant\n"]
    assert list(branch.token_ids) == [*prompt, *b"yes", 257]
    assert list(branch.mask) == [0] * 20 + [1] * 4
    assert list(branch.versions) == [-1] * 20 + [0] * 4
    assert list(branch.logprobs) == pytest.approx([0.0] * 20 + [-0.1, -0.2, -0.3, -0.4])
    assert (record.status, record.stop_reason, record.truncated) == ("ok", StopReason.COMPLETED, False)
    assert (record.reward, record.rewards["is_yes"].score, record.metrics["turns"]) == (1.0, 1.0, 1.0)
    assert record.seed == seeds.derive(5, "t", 2, 1)
    turn_seed = seeds.derive(seeds.derive(record.seed, "branch", "main"), "turn", 0)
    assert [(turn.start, turn.end, turn.seed, turn.matched_stop) for turn in branch.turns] == [(20, 24, turn_seed, 257)]
    assert record.messages == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    assert engine.num_sessions == 0


async def test_tool_results_are_joined_and_nothing_is_encoded_again() -> None:
    sandbox = FakeSandbox({"add": add})
    engine = ScriptedEngine([said(called("add", '{"a": 2, "b": 3}')), said("yes")])
    record = await run_episode(stage(WithTools(), engine, sandbox=sandbox), TASK)
    first, second = engine.requests
    assert list(second.observed_ids) == [
        *b"\n", 256, *b"user\n", 260, *b"\n5\n", 261, 257, *b"\n", 256, *b"assistant\n"
    ]  # fmt: skip
    assert second.context_tokens == first.context_tokens + len(said(called("add", '{"a": 2, "b": 3}'))) + 25
    assert (record.calls[0].outcome, record.calls[0].result, record.calls[0].turn) == ("ok", "5", 0)
    assert record.kv == {"tokens_cached": second.context_tokens - 25, "tokens_prefilled": first.context_tokens + 25}
    assert engine.pauses == ["add"]
    assert sandbox.num_open == 0


async def test_c10_a_cut_turn_runs_no_tool() -> None:
    text = called("search", '{"q": "' + "x" * 40)
    turns = text, called("search", '{"q": "a"}') + text, '<tool_call>{"path": "a.md"}' + "x" * 90
    for ids in map(said, turns):
        sandbox = FakeSandbox({"search": search})
        engine = ScriptedEngine([ids])
        setup = stage(WithTools(), engine, sandbox=sandbox, limits=Limits(max_turn_tokens=80))
        record = await run_episode(setup, TASK)
        assert record.branches[0].turns[0].finish_reason == "length"
        assert (record.stop_reason, record.truncated, record.status) == (StopReason.TURN_LENGTH, True, "ok")
        assert (sampled(record), record.calls, sandbox.calls) == (80, [], [])
        assert list(record.branches[0].token_ids[-80:]) == ids[:80]


async def test_c11_unknown_malformed_and_good_calls_in_one_turn() -> None:
    calls = ("add", '{"a": 2, "b": 3}'), ("serach", '{"q": "x"}'), ("search", '{"q": "x",}')
    turn = "\n".join(called(*call) for call in calls)
    sandbox = FakeSandbox({"add": add, "search": search})
    record = await run_episode(stage(WithTools(), ScriptedEngine([said(turn), said("yes")]), sandbox=sandbox), TASK)
    first, second, third = [message["content"] for message in record.messages if message["role"] == "tool"]
    assert first == "5"
    assert second == "error: unknown tool 'serach'; available: add, search"
    assert third.startswith("error: the arguments are not valid JSON: ")
    assert third.endswith(" at character 10")
    assert sandbox.calls == [("add", {"a": 2, "b": 3})]
    counts = {name: value for name, value in record.metrics.items() if name.startswith("tool_calls")}
    assert counts == {"tool_calls": 3.0, "tool_calls_unknown_tool": 1.0, "tool_calls_malformed": 1.0}
    assert (record.status, record.reward, record.truncated) == ("ok", 1.0, False)


async def test_c09_a_call_in_reasoning_that_never_closes_is_not_run_but_answered_and_counted() -> None:
    sandbox = FakeSandbox({"add": add})
    draft = "<think>I will " + called("add", '{"a": 2, "b": 3}')
    record = await run_episode(stage(WithTools(), ScriptedEngine([said(draft), said("yes")]), sandbox=sandbox), TASK)
    assert sandbox.calls == []
    (answer,) = [message["content"] for message in record.messages if message["role"] == "tool"]
    assert answer == "error: a call inside <think> is not run; write </think> before it"
    assert record.metrics["tool_call_in_reasoning"] == 1.0
    assert (record.status, record.reward) == ("ok", 1.0)


async def test_arguments_that_break_the_schema_are_named_with_their_place() -> None:
    sandbox = FakeSandbox({"add": add})
    engine = ScriptedEngine([said(called("add", '{"a": 2, "b": "3"}')), said(called("add", '{"a": 2}')), said("no")])
    record = await run_episode(stage(WithTools(), engine, sandbox=sandbox), TASK)
    assert [call.outcome for call in record.calls] == ["bad_arguments", "bad_arguments"]
    assert [call.result for call in record.calls] == [
        "error: arguments.b: '3' is not of type 'number'",
        "error: arguments: 'b' is a required property",
    ]
    assert sandbox.calls == []


class Overflowing(Plain):
    """Answers the first turn with a tool message of a given length; may end there with reward 1."""

    def __init__(self, length: int, *, is_done: bool = False) -> None:
        self.length, self.is_done, self.num_scored = length, is_done, 0

    async def step(self, episode: Episode, turn: Turn) -> Sequence[Message] | None:
        if self.is_done:
            episode.finish(1.0)
        return [Message("tool", "x" * self.length)]

    @reward(weight=1.0)
    async def is_yes(self, episode: Episode) -> float:
        self.num_scored += 1
        return 0.0


@pytest.mark.parametrize(("prompt", "length"), [(70, 16), (64, 10)])
async def test_c20_ab_no_room_after_a_tool_result(prompt: int, length: int) -> None:
    engine = ScriptedEngine([said("123456789"), said("late")], context_length=64)
    environment = Overflowing(length)
    record = await run_episode(stage(environment, engine), TASK)
    assert 20 + 10 + 24 + length == prompt
    assert [request.context_tokens for request in engine.requests] == [20]
    assert (record.stop_reason, record.truncated, record.status) == (StopReason.CONTEXT_LENGTH, True, "ok")
    assert (sampled(record), environment.num_scored, record.reward) == (10, 1, 0.0)


async def test_a_prompt_longer_than_the_context_is_a_failure_that_says_so() -> None:
    engine = ScriptedEngine([said("late")], context_length=20)
    record = await run_episode(stage(Overflowing(9), engine), TASK)
    assert (record.status, record.stop_reason, record.reward) == ("error", StopReason.ERROR, None)
    assert record.error is not None
    assert record.error.boundary == "environment"
    assert record.error.message == (
        "the prompt of agent 'main' has 20 tokens and the model's context only 20, which leaves no room for a turn; "
        "shorten the task or the tool list, or use a model with a longer context"
    )
    assert engine.requests == []


async def test_c20_c_room_for_one_token() -> None:
    engine = ScriptedEngine([said("123456789"), said("late")], context_length=64)
    record = await run_episode(stage(Overflowing(9), engine), TASK)
    assert [(request.context_tokens, request.max_tokens) for request in engine.requests] == [(20, 44), (63, 1)]
    assert (record.stop_reason, record.truncated, sampled(record)) == (StopReason.CONTEXT_LENGTH, True, 11)


async def test_c20_d_the_environment_was_done() -> None:
    engine = ScriptedEngine([said("123456789"), said("late")], context_length=64)
    record = await run_episode(stage(Overflowing(16, is_done=True), engine), TASK)
    assert (record.stop_reason, record.truncated, record.reward) == (StopReason.COMPLETED, False, 1.0)
    assert len(engine.requests) == 1


async def test_c51_rewards_that_are_no_finite_number() -> None:
    class Odd(Plain):
        @reward(weight=1.0)
        async def is_yes(self, episode: Episode) -> float:
            return float("nan")

        @metric
        async def infinite(self, episode: Episode) -> float:
            return float("inf")

    record = await run_episode(stage(Odd(), ScriptedEngine([said("yes")])), TASK)
    assert (record.reward, record.reward_reason, record.status) == (None, "non_finite_reward", "ok")
    assert record.rewards["is_yes"].score is None
    assert "infinite" not in record.metrics


async def test_c51_an_infinite_argument_is_refused() -> None:
    sandbox = FakeSandbox({"add": add})
    engine = ScriptedEngine([said(called("add", '{"a": 1e400, "b": 1}')), said("no")])
    record = await run_episode(stage(WithTools(), engine, sandbox=sandbox), TASK)
    assert sandbox.calls == []
    assert record.calls[0].result == "error: the arguments hold a number that is not finite or too large"


async def test_an_engine_failure_is_the_engines() -> None:
    record = await run_episode(stage(Plain(), ScriptedEngine([])), TASK)
    assert record.error is not None
    assert (record.status, record.error.boundary, record.error.type) == ("error", "engine", "EngineFailure")
    assert (record.reward, record.reward_reason, record.stop_reason) == (None, "episode_failed", StopReason.ERROR)


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
async def test_a_logprob_that_is_not_finite_fails_its_episode_and_the_file_can_be_read(logprob: float) -> None:
    answer = Answer(said("yes"), logprobs=[-0.1, logprob, -0.3, -0.4])
    record = await run_episode(stage(Plain(), ScriptedEngine([answer])), TASK)
    assert record.error is not None
    assert (record.error.boundary, record.error.message, record.reward) == (
        "engine", "the engine gave a sampled token a logprob that is not finite", None
    )  # fmt: skip
    (branch,) = decode(encode(record), EpisodeRecord).branches
    assert (branch.token_ids, branch.mask, branch.turns) == (
        record.branches[0].token_ids, record.branches[0].mask, record.branches[0].turns
    )  # fmt: skip
    assert [str(one) for one in branch.logprobs[-4:]] == [str(one) for one in Floats([-0.1, float("nan"), -0.3, -0.4])]


def unread(words: Any) -> Any:
    """What the types forbid, as a user without a type checker gives it."""
    return words


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (lambda agent: agent.sample(unread("hello")), "a message is a Message(role, content), not a str"),
        (lambda agent: agent.sample(unread({"role": "user"})), "a message is a Message(role, content), not a dict"),
        (lambda agent: agent.episode.agent(unread(3)), "the name of an agent must be a string, not the int 3"),
        (lambda agent: agent.fork(unread(3)), "the name of an agent must be a string, not the int 3"),
        (lambda agent: agent.episode.stop(unread("enough")), "'enough' is not a valid StopReason"),
        (lambda agent: Message(unread("robot"), "x"), "Message.role must be one of system, user, assistant, tool, not 'robot'"),
        (lambda agent: Message("user", unread(7)), "Message.content must be a string, not int"),
    ],
)  # fmt: skip
async def test_what_would_make_a_record_that_cannot_be_read_is_refused(does: Any, why: str) -> None:
    class Wrong(Plain):
        async def rollout(self, task: Task, agent: Agent) -> None:
            given = does(agent)
            if hasattr(given, "__await__"):
                await given

    record = await run_episode(stage(Wrong(), ScriptedEngine([])), TASK)
    assert record.error is not None
    assert (record.error.boundary, record.error.message) == ("environment", why)
    assert decode(encode(record), EpisodeRecord) == record


class Panic(BaseException):
    """As Rust libraries raise it."""


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (SystemExit(3), "SystemExit", "3"),
        (Panic("index out of bounds"), "Panic", "index out of bounds"),
        (BaseExceptionGroup("both", [EpisodeEnd(), Panic("one")]), "Panic", "one"),
        (ValueError("half \ud800"), "ValueError", "half ?"),
        (Mute(), "Mute", "Mute, whose text cannot be had: RuntimeError"),
    ],
)
async def test_whatever_an_environment_raises_ends_its_own_episode(
    error: BaseException, kind: str, message: str
) -> None:
    class Raises(Plain):
        async def rollout(self, task: Task, agent: Agent) -> None:
            await agent.sample()
            raise error

    record = await run_episode(stage(Raises(), ScriptedEngine([said("one")])), TASK)
    assert record.error is not None
    assert (record.status, record.error.boundary, record.error.type) == ("error", "environment", kind)
    assert (record.error.message, sampled(record)) == (message, 4)
    assert decode(encode(record), EpisodeRecord) == record


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancellation_that_nobody_asked_for_is_a_failure() -> None:
    """An await for a task that the environment, or a library of its, has ended; it must not pass for the run's own end."""

    class Leaks(Plain):
        async def rollout(self, task: Task, agent: Agent) -> None:
            ended = asyncio.ensure_future(asyncio.sleep(60))
            ended.cancel()
            await ended

    record = await run_episode(stage(Leaks(), ScriptedEngine([])), TASK)
    assert record.error is not None
    assert (record.status, record.error.boundary, record.error.type) == ("error", "environment", "CancelledError")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_a_gather_leaves_behind_has_ended_before_the_episode_is_scored() -> None:
    """Its tokens came after the record, and the tool into the grader's way."""
    ran: list[str] = []

    async def slow(arguments: dict[str, Any]) -> str:
        try:
            await anyio.sleep(1)
        finally:
            ran.append("ended")
        return "done"

    class Gathers(WithTools):
        async def rollout(self, task: Task, agent: Agent) -> None:
            other = agent.episode.agent("other", Message("user", "q"))

            async def end() -> None:
                await anyio.sleep(0.35)
                agent.episode.stop(StopReason.COMPLETED)

            await asyncio.gather(other.sample(), agent.call(ToolCall("search", {"q": "x"})), end())

        @reward
        async def is_quiet(self, episode: Episode) -> float:
            return float(ran == ["ended"] and [call.outcome for call in episode.calls] == ["cancelled"])

    engine = ScriptedEngine([Answer(said("x" * 9), seconds=1)])
    record = await run_episode(stage(Gathers(), engine, sandbox=FakeSandbox({"search": slow})), TASK)
    assert (record.status, record.stop_reason, record.rewards["is_quiet"].score) == ("ok", StopReason.COMPLETED, 1.0)
    (turn,) = record.branches[1].turns
    assert (turn.finish_reason, turn.end - turn.start) == ("abort", sampled(record))
    before = encode(record)
    await anyio.sleep(0.3)
    assert encode(record) == before
    assert 1 <= sampled(record) < 10


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncios_own_cancellation_passes() -> None:
    class Waits(Plain):
        async def rollout(self, task: Task, agent: Agent) -> None:
            await anyio.sleep_forever()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run_episode(stage(Waits(), ScriptedEngine([])), TASK), 0.05)


async def test_a_stop_reason_may_be_spelt() -> None:
    class Stops(Plain):
        async def rollout(self, task: Task, agent: Agent) -> None:
            agent.episode.stop(unread("no_progress"))

    record = await run_episode(stage(Stops(), ScriptedEngine([])), TASK)
    assert (record.stop_reason, record.truncated) == (StopReason.NO_PROGRESS, True)


def test_the_id_of_a_task_is_a_string() -> None:
    with pytest.raises(TypeError, match=r"Task\.id must be a string, not the int 3"):
        Task(unread(3), ())


async def test_a_fork_shares_the_prefix_and_differs_in_seed() -> None:
    class Forking(Plain):
        async def rollout(self, task: Task, agent: Agent) -> None:
            await agent.sample()
            twin = agent.fork("twin")
            await twin.sample(Message("user", "again"))
            await agent.sample(Message("user", "again"))

    engine = ScriptedEngine([said("one"), said("two")])
    record = await run_episode(stage(Forking(), engine), TASK)
    main, twin = record.branches
    assert twin.fork is not None
    assert (twin.fork.branch, twin.fork.at) == ("main", 24)
    assert joined(record, twin).token_ids == main.token_ids
    assert main.turns[1].seed != twin.turns[0].seed
    assert engine.num_sessions == 0


async def test_c01_a_rewritten_history_is_another_branch_and_the_record_says_why() -> None:
    """The environment asks for the history without reasoning: the first branch stays as sampled, the new one is fresh."""

    class Forgetful(Plain):
        async def rollout(self, task: Task, agent: Agent) -> None:
            with pytest.raises(ValueError, match="these messages continue the branch"):
                agent.rewrite("same", *task.messages, Message("user", "more"))
            turn = await agent.sample()
            kept = (*task.messages, Message("assistant", turn.content), Message("user", "again"))
            other = agent.rewrite("without", *kept)
            await other.sample()

    engine = ScriptedEngine([said("<think>\nhm\n</think>\n\none"), said("two")])
    record = await run_episode(stage(Forgetful(), engine), TASK)
    assert record.error is None
    main, without = record.branches
    assert (main.fork, main.rewrite, without.fork) == (None, None, None)
    assert without.rewrite == Rewrite("main", "message 1 (assistant) has another reasoning")
    assert main.mask.count(1) == main.turns[0].end - main.turns[0].start
    assert without.mask.count(1) == without.turns[0].end - without.turns[0].start
    assert "hm" not in byte_tokenizer().decode(without.token_ids[: without.turns[0].start])
    assert "hm" in byte_tokenizer().decode(main.token_ids)


async def test_c23_an_agent_of_an_episode_needs_no_permit() -> None:
    class Several(Plain):
        async def rollout(self, task: Task, agent: Agent) -> None:
            async with anyio.create_task_group() as helpers:
                for name in ("left", "right"):
                    helpers.start_soon(agent.episode.agent(name, Message("user", name)).sample)
            await agent.sample()

    record = await run_episode(stage(Several(), ScriptedEngine([said("yes")])), TASK)
    assert [(branch.name, len(branch.turns)) for branch in record.branches] == [("main", 1), ("left", 1), ("right", 1)]
    assert record.reward == 1.0
