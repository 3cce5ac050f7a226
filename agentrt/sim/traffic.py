"""Agent traffic: how many turns an episode has, how long they are, what its tools take and give. A function of the seed.

Everything is drawn per episode and turn, never by order of events, so each policy meets the same episodes. It comes as an
environment, a renderer and a tool runner, so the real dispatcher and episode loop play it. Ids mean nothing: a prompt is its
task's number over and over, everything else a number of its own, so that the prefix cache finds what members of a group share.
"""

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cache
from random import Random
from types import TracebackType
from typing import Any, NamedTuple, Self

import anyio
import msgspec

from agentrt.core import clock, seeds
from agentrt.core.protocol import FinishReason
from agentrt.core.tokens import Ids
from agentrt.engine.sequence import Sequence as EngineSequence
from agentrt.engine.simulate import Say
from agentrt.env.chat.message import Message, ToolCall, Turn
from agentrt.env.chat.renderer import Shown, ToolDescription
from agentrt.env.environment import Agent, Environment
from agentrt.env.task import Task
from agentrt.env.tool import Tool
from agentrt.sandbox.relay import Address
from agentrt.sandbox.reply import Progress
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.terms import Terms

END_ID = 0
FIRST_OWN_ID = 1 << 20
"""Ids below it are tasks, plus one."""
VOCAB_SIZE = 1 << 31
TOOL = "tool"
LEAST_CONTEXT = 8
"""A turn takes an eighth of the context at most."""
LEAST_EXPONENT = 0.1
"""Of the law of slow calls: with less, what is drawn can pass the largest float."""
MEAN_EPISODES = 400
"""Over which the mean context is taken."""


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Lognormal counts, each by its median and the deviation of its logarithm; tools quick or slow."""

    turns: tuple[float, float] = (20.0, 0.5)
    sampled_tokens: tuple[float, float] = (100.0, 0.8)
    """Of a turn."""
    result_tokens: tuple[float, float] = (500.0, 0.8)
    """Of a tool."""
    prompt_tokens: int = 2000
    context_tokens: int = 32_768
    quick_share: float = 0.86
    quick_seconds: float = 0.3
    """The mean; exponential."""
    slow_seconds: float = 1.0
    """What a slow call takes more than a Pareto law with its least value 1."""
    slow_exponent: float = 1.1
    longest_seconds: float = 300.0
    """A call that takes longer is ended."""

    def __post_init__(self) -> None:
        for name in ("turns", "sampled_tokens", "result_tokens"):
            median, deviation = getattr(self, name)
            if not (0 < median < math.inf and 0 <= deviation < math.inf):
                raise ValueError(
                    f"{name} takes a median above 0 and a deviation of 0 or more, not {median}, {deviation}"
                )
        for name in ("prompt_tokens", "quick_seconds", "longest_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.context_tokens <= max(self.prompt_tokens, LEAST_CONTEXT):
            raise ValueError(f"context_tokens ({self.context_tokens}) must be above prompt_tokens, and {LEAST_CONTEXT}")
        if not 0 <= self.quick_share <= 1:
            raise ValueError(f"quick_share must be in [0, 1], not {self.quick_share}")
        if not 0 <= self.slow_seconds < math.inf:
            raise ValueError(f"slow_seconds must be 0 or more, not {self.slow_seconds}")
        if not LEAST_EXPONENT <= self.slow_exponent < math.inf:
            raise ValueError(f"slow_exponent must be {LEAST_EXPONENT} or more, not {self.slow_exponent}")

    def episode(self, seed: int) -> "EpisodePlan":
        """The calls of an episode."""
        draw = Random(seed)
        turns = _count(draw, self.turns)
        calls = [Call(self._seconds(draw), _count(draw, self.result_tokens)) for _ in range(turns - 1)]
        return EpisodePlan(calls)

    def turn_tokens(self, seed: int) -> int:
        """How many ids a turn has, its end counted."""
        return _count(Random(seed), self.sampled_tokens)

    def mean_context(self) -> float:
        """Ids of the context at the end of a turn, over the turns of many episodes."""
        return _mean_context(self)

    def _seconds(self, draw: Random) -> float:
        if draw.random() < self.quick_share:
            return draw.expovariate(1 / self.quick_seconds)
        return self.slow_seconds + draw.paretovariate(self.slow_exponent)


@cache
def _mean_context(traffic: Traffic) -> float:
    total = turns = 0
    for number in range(MEAN_EPISODES):
        context = traffic.prompt_tokens
        for call in [Call(0.0, 0), *traffic.episode(seeds.derive(0, "mean", number)).calls]:
            sampled = traffic.turn_tokens(seeds.derive(0, "mean", number, turns))
            context = min(context + call.tokens + sampled, traffic.context_tokens)
            total, turns = total + context, turns + 1
    return total / turns


class Call(NamedTuple):
    """A tool call, and what it gives."""

    seconds: float
    tokens: int


class EpisodePlan(NamedTuple):
    """The calls between an episode's turns."""

    calls: list[Call]


class Policy(NamedTuple):
    """`engine.simulate.Script`: the turn lengths of a traffic."""

    traffic: Traffic

    def say(self, sequence: EngineSequence) -> Say:
        """An id of the turn's own, and the end where the turn is as long as it is to be."""
        own = FIRST_OWN_ID + sequence.seed % (VOCAB_SIZE - FIRST_OWN_ID)
        return Say(own, min(self.traffic.turn_tokens(sequence.seed), sequence.max_tokens), END_ID)


class Renderer:
    """`env.chat.renderer.Renderer` of contents that are counts."""

    stop_token_ids = (END_ID,)

    def __init__(self) -> None:
        self._own = FIRST_OWN_ID

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolDescription] = ()) -> Sequence[int]:
        number, count = map(int, messages[0].content.split())
        return Ids((number + 1,)) * count

    def join(self, messages: Sequence[Message], *, ended: bool, end_id: int | None = None) -> Sequence[int]:
        self._own = FIRST_OWN_ID + (self._own + 1) % (VOCAB_SIZE - FIRST_OWN_ID)
        return Ids((self._own,)) * sum(int(message.content) for message in messages)

    def turn(self, message: Message) -> list[int]:
        return [END_ID]

    def parse(
        self, token_ids: Sequence[int], finish_reason: FinishReason, tools: Sequence[ToolDescription] = ()
    ) -> Turn:
        return Turn(content="", finish_reason=finish_reason)

    def visible(self, text: str) -> Shown:
        return Shown("", text)

    def rewrites(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolDescription] = ()
    ) -> str:
        return ""


class TrafficEnvironment(Environment):
    """Tasks of a traffic, played turn by turn. `turn_seconds` is told how long each turn took from its request on."""

    tools = (Tool(name=TOOL, description="Takes time.", parameters={}, argv=(TOOL,)),)

    def __init__(self, traffic: Traffic, seed: int, turn_seconds: Callable[[float], None]) -> None:
        self._traffic, self._seed, self._note = traffic, seed, turn_seconds
        self._members: dict[str, int] = {}

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        """Without end."""
        number = 0
        while True:
            yield Task(id=str(number), messages=(Message("user", f"{number} {self._traffic.prompt_tokens}"),))
            number += 1

    async def rollout(self, task: Task, agent: Agent) -> None:
        """The turns and calls of one episode; members of a group start in order."""
        member = self._members[task.id] = self._members.get(task.id, -1) + 1
        plan = self._traffic.episode(seeds.derive(self._seed, "episode", task.id, member))
        await self._sample(agent)
        for call in plan.calls:
            results = await agent.call(ToolCall(TOOL, {"seconds": call.seconds, "tokens": call.tokens}))
            await self._sample(agent, *(Message("tool", str(call.tokens)) for _ in results))

    async def _sample(self, agent: Agent, *messages: Message) -> None:
        asked = clock.now()
        await agent.sample(*messages)
        self._note(clock.now() - asked)


class TrafficRunner:
    """`rollout.calls.ToolRunner` that sleeps. With `foretells`, calls say at once how long they take."""

    def __init__(self, *, foretells: bool) -> None:
        self._foretells = foretells

    async def call(
        self, argv: Sequence[str], request: Any, *, seconds: float, terms: Terms, queued: bool = True,
        on_progress: Callable[[Progress], None] | None = None, outside: Address | None = None,
    ) -> ToolResult:  # fmt: skip
        taken = min(request["seconds"], seconds)
        if self._foretells and on_progress is not None:
            on_progress(Progress(eta_s=taken))
        await anyio.sleep(taken)
        return ToolResult(outcome="ok" if taken < seconds else "timeout", text="", seconds=taken)

    def fork(self) -> Self:
        return self

    def put(self, files: Mapping[str, str]) -> None:
        """There are none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _count(draw: Random, law: tuple[float, float]) -> int:
    median, deviation = law
    return max(1, round(draw.lognormvariate(math.log(median), deviation)))
