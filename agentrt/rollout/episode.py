"""`Episode`: what the environment's code may ask for while an episode runs, and what it left when it is scored."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import anyio
import msgspec

from agentrt.core import clock, seeds
from agentrt.core.errors import SandboxFailure, attributed_to
from agentrt.core.protocol import Completion, Session, SessionHints
from agentrt.core.records import MAIN, BranchRecord, CallRecord, StopReason
from agentrt.env.chat.message import Message, Turn
from agentrt.env.rubric import Scores, to_outcome
from agentrt.env.task import Task
from agentrt.env.tool import Tool
from agentrt.report.running import Phase
from agentrt.rollout.agent import Agent
from agentrt.rollout.calls import INFRA, OK, ToolRunner
from agentrt.rollout.costs import KVCosts
from agentrt.rollout.group import Peers
from agentrt.rollout.limits import Budget
from agentrt.rollout.setup import Setup

GIVEN_REWARD = "environment"
"""The name of the reward that `episode.finish(reward)` gave."""


class EpisodeEnd(BaseException):
    """Leaves the environment's code when its episode has ended; no `Exception`, so not caught by accident."""


class Timing:
    """Seconds by what they were spent on."""

    __slots__ = ("decode", "prefill", "queue", "scoring", "tools", "total")

    def __init__(self) -> None:
        self.queue = self.prefill = self.decode = self.tools = self.scoring = self.total = 0.0

    def add(self, completion: Completion) -> None:
        """Add one turn."""
        self.queue += completion.queue_seconds
        self.prefill += completion.prefill_seconds
        self.decode += completion.decode_seconds


class Episode:
    """Implements `agentrt.env.environment.Episode`. A context manager: leaving it closes the sessions of its agents."""

    __slots__ = (
        "_adopted", "_agents", "_calls", "_given", "_is_over", "_member", "_seen", "_sessions", "_under_way", "budget", "kv",
        "metrics", "peers", "phase", "phase_since", "runner", "seed", "setup", "started", "state", "stop_reason", "task",
        "timing", "tool_name",
    )  # fmt: skip

    def __init__(
        self, setup: Setup, task: Task, member: int, seed: int, runner: ToolRunner, peers: Peers | None = None
    ) -> None:
        self.setup, self.task, self.seed, self.runner, self._member = setup, task, seed, runner, member
        self.peers = peers or Peers(1)
        self.budget = Budget(setup.limits, setup.engine.info.context_length)
        self.state: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.stop_reason: StopReason | None = None
        self.timing = Timing()
        self.kv = KVCosts()
        self._agents: dict[str, Agent] = {}
        self._adopted: list[BranchRecord] = []
        self._calls: list[CallRecord] = []
        self._given: float | None = None
        self._seen: set[bytes] = set()
        """The calls made so far."""
        self._sessions = ExitStack()
        self._under_way: dict[anyio.CancelScope, anyio.Event] = {}
        """What is waited for, each with what is set when it has ended."""
        self._is_over = False
        self.phase: Phase = "environment"
        """For displays, as `agentrt.report.running.RunningEpisode` has it."""
        self.tool_name = ""
        self.started = self.phase_since = clock.now()

    def __repr__(self) -> str:
        return f"<Episode {self.task.id} member {self._member}, {self.stop_reason or 'running'}>"

    def __enter__(self) -> "Episode":
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over = True
        self._sessions.close()

    @property
    def label(self) -> str:
        """Task and member, for people."""
        return f"{self.task.id} member {self._member}"

    @property
    def turns(self) -> int:
        """Turns begun, over all branches."""
        return self.budget.turns

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around a turn, tool calls or a program, while they are waited for: `end_what_is_under_way` ends the block."""
        ended = anyio.Event()
        with anyio.CancelScope() as scope:
            self._under_way[scope] = ended
            try:
                yield
            finally:
                del self._under_way[scope]
                ended.set()
        if scope.cancelled_caught:
            raise EpisodeEnd

    async def end_what_is_under_way(self) -> None:
        """End what a task waits for that the environment's code has left behind, as `asyncio.gather` does when one of
        several raises: nothing is sampled, and no tool runs, while an episode is scored and recorded."""
        while self._under_way:
            scope, ended = next(iter(self._under_way.items()))
            scope.cancel()
            await ended.wait()

    def enter(self, phase: Phase, tool_name: str = "") -> None:
        """Say what it does from now on."""
        self.phase, self.tool_name, self.phase_since = phase, tool_name, clock.now()

    @property
    def main(self) -> Agent:
        return self._agents[MAIN]

    @property
    def agents(self) -> Sequence[Agent]:
        """All agents, in the order they were opened."""
        return list(self._agents.values())

    def branches(self) -> list[BranchRecord]:
        """Every branch as it is stored."""
        own = [agent for agent in self.agents if len(agent.tokens) or not self._adopted]
        return [*self._adopted, *(agent.record() for agent in own)]

    def adopt(self, branches: Sequence[BranchRecord], messages: Sequence[Message], last_turn: Turn | None) -> None:
        """Take over what was said by way of an endpoint: `branches`, and what the main agent heard and said last."""
        if len(self.main.tokens):
            raise ValueError("the main agent has sampled; a program's turns cannot be put in the place of its own")
        self._adopted = list(branches)
        self.main.messages, self.main.last_turn = tuple(messages), last_turn

    @property
    def calls(self) -> Sequence[CallRecord]:
        return self._calls

    @property
    def answer(self) -> str:
        turn = self.main.last_turn
        return turn.content if turn is not None else ""

    async def run(self, program: Tool, arguments: dict[str, Any]) -> str:
        """See `agentrt.env.environment.Episode.run`."""
        seconds = self.setup.limits.score_seconds
        with self.under_way():
            result = await self.runner.call(
                program.argv, arguments, seconds=seconds, terms=program.terms, queued=not self._is_over
            )
        if result.outcome == INFRA:
            raise SandboxFailure(result.text)
        if result.outcome != OK:
            raise RuntimeError(f"{program.name}: {result.outcome}: {result.text or result.stderr}")
        return result.text

    def agent(self, name: str, *messages: Message) -> Agent:
        """See `agentrt.env.environment.Episode.agent`."""
        return self.opened(name, self._session(name), messages, self.runner)

    def finish(self, reward: float | None = None) -> None:
        """See `agentrt.env.environment.Episode.finish`."""
        self.stop_reason = self.stop_reason or StopReason.COMPLETED
        self._given = reward

    def stop(self, reason: StopReason) -> NoReturn:
        """See `agentrt.env.environment.Episode.stop`. The first reason counts."""
        self.require_running()
        self.stop_reason = self.stop_reason or StopReason(reason)
        raise EpisodeEnd

    def raise_if_ended(self) -> None:
        """Raise `EpisodeEnd` if there can be no further turn."""
        self.require_running()
        if self.stop_reason is not None:
            raise EpisodeEnd

    def require_running(self) -> None:
        """Raise if the sessions are closed: rewards see an episode that is over."""
        if self._is_over:
            raise RuntimeError("the episode is over: a reward or metric reads it and cannot go on with it")

    def opened(self, name: str, session: Session, messages: tuple[Message, ...], runner: ToolRunner) -> Agent:
        """A new agent over `session`, and `runner` if it is not the episode's; this episode enters and leaves them."""
        self.require_running()
        if not isinstance(name, str):
            raise TypeError(f"the name of an agent must be a string, not the {type(name).__name__} {name!r}")
        if name in self._agents:
            raise ValueError(f"the episode has an agent {name!r} already; branches of one episode have different names")
        if runner is not self.runner:
            with attributed_to(SandboxFailure, "the sandbox cannot be copied"):
                self._sessions.enter_context(runner)
        agent = Agent(self, name, self._sessions.enter_context(session), messages, runner)
        self._agents[name] = agent
        return agent

    def note_turn(self, turn: Turn) -> None:
        """Count what is worth knowing of a turn."""
        if turn.tool_call_in_reasoning:
            name = "tool_call_in_reasoning"
            self.metrics[name] = self.metrics.get(name, 0.0) + turn.tool_call_in_reasoning

    def note_calls(self, records: Sequence[CallRecord]) -> None:
        """Keep a turn's call records, and judge whether the turn was progress."""
        keys = [msgspec.json.encode((record.name, record.arguments), order="sorted") for record in records]
        has_progress = any(
            record.outcome == OK and key not in self._seen for record, key in zip(records, keys, strict=True)
        )
        self._seen.update(keys)
        self._calls.extend(records)
        if records:
            self.budget.judge(has_progress=has_progress)

    def hints(self) -> SessionHints:
        """What the engine may know of this episode now."""
        wall = self.setup.limits.wall_seconds
        versions = [agent.oldest_version for agent in self._agents.values() if agent.oldest_version is not None]
        return SessionHints(
            group=self.task.id, members_left=self.peers.left, oldest_version=min(versions, default=None),
            deadline=None if wall is None else max(0.0, self.started + wall - clock.now()),
        )  # fmt: skip

    def counts(self) -> dict[str, float]:
        """The metrics that every episode has."""
        counts = {"turns": float(self.budget.turns), "tool_calls": float(len(self._calls))}
        for record in self._calls:
            if record.outcome != OK:
                name = f"tool_calls_{record.outcome}"
                counts[name] = counts.get(name, 0.0) + 1.0
        return counts

    def add_given_reward(self, scores: Scores) -> None:
        """Add the reward that `finish` was given."""
        if self._given is not None:
            scores.add(GIVEN_REWARD, to_outcome(self._given), 1.0)

    def _session(self, name: str) -> Session:
        seed = seeds.derive(self.seed, "branch", name)
        return self.setup.engine.session(seed=seed, hints=self.hints())
