"""`Environment`: where tasks come from, what answers a turn, and what it is worth.

A subclass gives `tasks` and `@reward` functions; everything else has a default. The whole episode is one method,
`rollout`, an ordinary async program over an `Agent`; the default one samples, lets `step` answer, and repeats. `Agent` and
`Episode` say what such a program may ask of the runtime, which enforces the limits inside these calls.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

from agentrt.core.errors import UsageError
from agentrt.core.records import CallRecord, StopReason
from agentrt.core.tokens import Tokens
from agentrt.env.chat.message import Message, ToolCall, Turn
from agentrt.env.task import Task
from agentrt.env.tool import Tool
from agentrt.sandbox.level import Isolation
from agentrt.sandbox.sandbox import require


class Agent(Protocol):
    """One branch of an episode: a conversation with the policy."""

    @property
    def name(self) -> str: ...

    @property
    def episode(self) -> "Episode": ...

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far."""

    @property
    def tokens(self) -> Tokens:
        """The same as ids, with mask, logprobs and versions; read only."""

    async def sample(self, *messages: Message) -> Turn:
        """Append `messages`, let the policy take a turn, and return it parsed.

        If a limit leaves no room for a turn, the episode ends here: the call does not return.
        """

    async def call(self, *calls: ToolCall) -> list[Message]:
        """Run tool calls, side by side; one tool message for each, in call order, to be given to `sample`.

        An unknown tool, bad arguments, a time-out or a failing tool give a message that says so.
        """

    def fork(self, name: str) -> "Agent":
        """A new branch that shares what was said so far, and its KV. Its tools get a copy of the files that are there; what
        a tool holds in memory (a Python session) starts anew."""

    def rewrite(self, name: str, *messages: Message) -> "Agent":
        """A new branch that goes on from `messages` in the place of this one's history: compacted, without reasoning.

        It has a prompt and a mask of its own, and shares the KV of what is equal. This branch stays as it was sampled;
        the record says what was rewritten. `ValueError` if `messages` only continue this branch: `sample` does that.
        """


class Episode(Protocol):
    """One episode while it runs and when it is scored."""

    @property
    def task(self) -> Task: ...

    @property
    def main(self) -> Agent:
        """The agent that was given the task's messages."""

    @property
    def state(self) -> dict[str, Any]:
        """The environment's own, for this episode."""

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers for the record."""

    @property
    def answer(self) -> str:
        """The content of the main agent's last turn; empty before the first."""

    @property
    def calls(self) -> Sequence[CallRecord]:
        """Every tool call so far, of all agents."""

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it ended; None while it runs."""

    async def run(self, program: Tool, arguments: dict[str, Any]) -> str:
        """The result of a program of the environment's own, run in the episode's sandbox: a checker of what the tools
        left there, for a reward or a step. The model hears nothing of it, and no limit of the episode counts it.

        Raises `RuntimeError` if it fails or takes longer than `limits.score_seconds`. It is ended with whatever
        waits for it, so a checker that hangs is gone when its reward has timed out. A group reward can run none: the
        sandbox is closed when the episode is scored.
        """

    def agent(self, name: str, *messages: Message) -> Agent:
        """A further agent with a prompt of its own: another branch of this episode."""

    def finish(self, reward: float | None = None) -> None:
        """The environment declares the end; the turn or observation in hand is the last. `reward`, if given, counts
        beside the rubric's rewards with weight 1."""

    def stop(self, reason: StopReason) -> NoReturn:
        """End the episode here, for `reason`."""


class Environment:
    """Tasks, tools, the answer to a turn, and rewards (methods decorated with `@reward`, `@metric`, `@group_reward`).

    One object serves all episodes of a run at once: what belongs to an episode goes into `episode.state`. The class's
    docstring states state, action, end condition and reward; `agentrt describe` prints it.
    """

    tools: ClassVar[Sequence[Tool]] = ()
    splits: ClassVar[Sequence[str]] = ("train", "eval")

    @property
    def programs(self) -> Sequence[Tool]:
        """All that its episodes start in a sandbox."""
        return self.tools

    def require(self, isolation: Isolation, *, allow_weak: bool) -> None:
        """Raise `UsageError`, before a run starts, if a program needs more isolation than is in force."""
        for program in self.programs:
            require(program.terms, isolation, allow_weak=allow_weak)

    def tasks(self, split: str) -> AsyncIterator[Task]:
        """The tasks of a split, always the same ones in the same order; it may be endless."""
        raise UsageError(f"{type(self).__name__} must define `async def tasks(self, split)`, which yields each Task")

    async def rollout(self, task: Task, agent: Agent) -> None:
        """One whole episode. Override it for full control; most environments override `step` or nothing."""
        turn = await agent.sample()
        while not turn.is_cut:
            answer = await self.step(agent.episode, turn)
            if answer is None or agent.episode.stop_reason is not None:
                return
            turn = await agent.sample(*answer)
        agent.episode.stop(turn.cut_by or StopReason.TURN_LENGTH)

    async def step(self, episode: Episode, turn: Turn) -> Sequence[Message] | None:
        """What the environment says to a turn; None ends the episode. By default: the results of the turn's tool calls,
        and the end when there are none."""
        return await episode.main.call(*turn.calls) if turn.calls else None


def check(environment: Environment) -> None:
    """Raise `UsageError` for tools or splits that cannot be."""
    kind, tools = type(environment).__name__, environment.tools
    for name, value in (("tools", tools), ("splits", environment.splits)):
        if isinstance(value, str | Tool):  # mostly a tuple of one without its comma
            raise UsageError(f"{kind}.{name} is one {type(value).__name__}, not several; write `{name} = (...,)`")
    wrong = next((one for one in tools if not isinstance(one, Tool)), None)
    if wrong is not None:
        raise UsageError(f"{kind}: {wrong!r} in tools is no Tool; write tool(...) around a name, a path or a function")
    names = [program.name for program in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{kind} has two tools with the name {twice!r}; rename one in its manifest")
