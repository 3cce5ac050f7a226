"""Episodes whose agent is a program with OpenAI's client. Here it is a function; in a sandbox, in tests/examples."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

import anyio
import httpx
import openai
import pytest
from openai import AsyncOpenAI

from agentrt import Environment, Task, reward
from agentrt.core.errors import UsageError
from agentrt.core.records import EpisodeRecord, StopReason
from agentrt.core.spec import Limits, SamplingParams
from agentrt.env.chat.message import Message
from agentrt.env.environment import Episode
from agentrt.rollout.play import run_episode
from agentrt.sandbox.level import Isolation, Level
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.terms import Terms
from agentrt.serve.program import ProgramEnvironment
from agentrt.testing import FakeSandbox, ScriptedEngine, fake_tool, said, stage

pytestmark = pytest.mark.anyio
TASK = Task("t", (Message("user", "hello"),))
Program = Callable[[AsyncOpenAI, Any, Mapping[str, str]], Awaitable[str]]


class Echo(ProgramEnvironment):
    """Whether the last answer is `two`."""

    program = fake_tool("agent")

    def tasks(self, split: str) -> AsyncIterator[Task]:
        raise NotImplementedError

    @reward(weight=1.0)
    async def is_two(self, episode: Episode) -> float:
        return float(episode.answer == "two")


class Inside(FakeSandbox):
    """Runs a function as the program: with its variables and the request, in this loop."""

    def __init__(self, function: Program) -> None:
        super().__init__({})
        self.function = function

    async def call(self, argv: Sequence[str], request: Any, *, terms: Terms, **more: Any) -> ToolResult:  # type: ignore[override]
        variables = terms.environment
        url, key = variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"]
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=20) as client:
            try:
                return ToolResult(outcome="ok", text=await self.function(client, request, variables))
            except (openai.APIError, ZeroDivisionError) as error:
                return ToolResult(outcome="exit_nonzero", text="", stderr=f"it said: {error}")


async def play(
    program: Program,
    environment: type[Environment] = Echo,
    script: Sequence[str] = ("one", "two", "three"),
    **more: Any,
) -> tuple[EpisodeRecord, ScriptedEngine]:
    engine = ScriptedEngine([said(text) for text in script])
    record = await run_episode(stage(environment(), engine, sandbox=Inside(program), **more), TASK)
    assert engine.num_sessions == 0
    return record, engine


async def two_turns(client: AsyncOpenAI, request: Any, variables: Mapping[str, str]) -> str:
    messages = [{"role": one["role"], "content": one["content"]} for one in request["messages"]]
    for text in ("go on", ""):
        done = await client.chat.completions.create(model="any", messages=messages, temperature=0.1, seed=7)
        answer = done.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]
    return f"I think {answer}"


async def test_what_a_program_says_and_hears_is_the_episode() -> None:
    record, engine = await play(two_turns, sampling=SamplingParams(temperature=0.9, top_p=0.5))
    assert (record.status, record.stop_reason, record.reward) == ("ok", StopReason.COMPLETED, 1.0)
    [branch] = record.branches
    first, second = branch.turns
    assert branch.token_ids[first.start : first.end].tolist() == said("one")
    assert branch.token_ids[second.start : second.end].tolist() == said("two")
    assert [index for index, bit in enumerate(branch.mask) if bit] == [
        *range(first.start, first.end), *range(second.start, second.end),
    ]  # fmt: skip
    assert [message["content"] for message in record.messages] == ["hello", "one", "go on", "two"]
    assert record.metrics["turns"] == 2.0
    laws = {(request.params.temperature, request.params.top_p) for request in engine.requests}
    assert laws == {(0.9, 0.5)}, "the run's law, whatever the program asks for"


async def test_a_limit_ends_the_program() -> None:
    seen: list[str] = []

    async def endless(client: AsyncOpenAI, request: Any, variables: Mapping[str, str]) -> str:
        while True:
            try:
                await client.chat.completions.create(model="any", messages=request["messages"][:1])
            except openai.PermissionDeniedError as error:
                seen.append(str(error))
                await anyio.sleep_forever()

    record, _ = await play(endless, limits=Limits(max_turns=2))
    assert (record.status, record.stop_reason, record.truncated) == ("ok", StopReason.MAX_TURNS, True)
    assert len(seen) <= 1
    assert [branch.fork is None for branch in record.branches] == [True, False]


async def test_a_turn_that_a_limit_forbids_leaves_nothing_on_its_branch() -> None:
    record, _ = await play(two_turns, limits=Limits(max_turns=1))
    assert (record.status, record.stop_reason) == ("ok", StopReason.MAX_TURNS)
    [branch] = record.branches
    [turn] = branch.turns
    assert (turn.end, turn.finish_reason) == (len(branch.token_ids), "stop")


async def test_a_turn_that_a_limit_cut_is_said_to_be() -> None:
    record, _ = await play(two_turns, script=("one", "twooo"), limits=Limits(max_turn_tokens=4))
    assert (record.stop_reason, record.truncated, record.messages[-1]["content"]) == (
        StopReason.TURN_LENGTH,
        True,
        "twoo",
    )


async def test_a_program_that_fails_keeps_what_was_sampled_and_has_no_reward() -> None:
    async def fails(client: AsyncOpenAI, request: Any, variables: Mapping[str, str]) -> str:
        await two_turns(client, request, variables)
        return str(1 // 0)

    async def silent(client: AsyncOpenAI, request: Any, variables: Mapping[str, str]) -> str:
        return "done"

    record, _ = await play(fails)
    assert record.error is not None
    assert (record.status, record.reward, record.error.boundary) == ("error", None, "environment")
    assert "exit_nonzero: it said: integer division" in record.error.message
    assert len(record.branches[0].turns) == 2
    record, _ = await play(silent)
    assert record.error is not None
    assert "without a word to the model" in record.error.message


async def test_a_request_that_is_refused_costs_nothing_of_what_was_said() -> None:
    async def too_long(client: AsyncOpenAI, request: Any, variables: Mapping[str, str]) -> str:
        await two_turns(client, request, variables)
        with pytest.raises(openai.BadRequestError, match="there is room for 4096"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 5000}])
        return ""

    record, _ = await play(too_long)
    assert (record.reward, len(record.branches), record.metrics["turns"]) == (1.0, 1, 2.0)


class Graded(Echo):
    """The program grades itself too."""

    gives_reward: ClassVar[bool] = True


async def test_a_reward_by_callback() -> None:
    async def graded(client: AsyncOpenAI, request: Any, variables: Mapping[str, str]) -> str:
        await two_turns(client, request, variables)
        async with httpx.AsyncClient() as http:
            url = variables["AGENTRT_REWARD_URL"]
            assert (await http.post(url, json={"reward": 9.0})).status_code == 401
            headers = {"authorization": f"Bearer {variables['OPENAI_API_KEY']}"}
            assert (await http.post(url, json={"reward": 0.5}, headers=headers)).status_code == 200
        return ""

    async def asks(client: AsyncOpenAI, request: Any, variables: Mapping[str, str]) -> str:
        assert "AGENTRT_REWARD_URL" not in variables
        return await two_turns(client, request, variables)

    record, _ = await play(graded, Graded)
    assert {name: score.score for name, score in record.rewards.items()} == {"is_two": 1.0, "environment": 0.5}
    assert (await play(asks))[0].reward == 1.0


async def test_keys_open_one_episode_only() -> None:
    keys: list[str] = []

    async def stranger(client: AsyncOpenAI, request: Any, variables: Mapping[str, str]) -> str:
        keys.append(client.api_key)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key=keys[0] + "x").models.list()
        with pytest.raises(openai.PermissionDeniedError):
            await client.chat.completions.create(model="m", messages=[], extra_headers={"X-Session-ID": "another"})
        root = variables["OPENAI_BASE_URL"].removesuffix("/v1")
        with pytest.raises(openai.NotFoundError):
            await client.with_options(base_url=root).delete("/sessions/agent", cast_to=object)
        return await two_turns(client, request, variables)

    for _ in range(2):
        assert (await play(stranger))[0].status == "ok"
    assert keys[0] != keys[1]


def test_a_run_is_refused_at_its_start_where_no_address_can_be_given() -> None:
    def at(level: Level) -> Isolation:
        return Isolation(level=level, layers={}, limits={}, reasons=("L3: no namespaces",), fixes=("allow namespaces",))

    environment = Echo()
    assert [program.name for program in environment.programs] == ["agent"]
    environment.require(at(Level.L3), allow_weak=False)
    with pytest.raises(
        UsageError, match=r"needs isolation L3, and this machine gives L2 \(L3: no names.*; allow names"
    ):
        environment.require(at(Level.L2), allow_weak=True)
