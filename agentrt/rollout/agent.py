"""`Agent`: one branch of an episode, a conversation held in two forms: messages for people, ids for the policy.

The session owns the ids. What is new is rendered and handed over; nothing said before is rendered or encoded again, so
a turn costs what is new in it.
"""

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

import anyio
import msgspec

from agentrt.core import clock, seeds
from agentrt.core.errors import EngineFailure, EnvironmentFailure, attributed_to
from agentrt.core.protocol import Completion, Session
from agentrt.core.records import BranchRecord, Fork, Rewrite, StopReason, TurnRecord, branch_record, turn_record
from agentrt.core.tokens import Tokens
from agentrt.env.chat.branch import rewrites
from agentrt.env.chat.message import Message, ToolCall, Turn
from agentrt.env.chat.offload import rendered
from agentrt.rollout import calls as tool_calls
from agentrt.rollout.calls import ToolRunner

if TYPE_CHECKING:
    from agentrt.rollout.episode import Episode


class Agent:
    """Implements `agentrt.env.environment.Agent`. The episode enters and leaves its session."""

    __slots__ = (
        "_fork", "_is_opened", "_last_tool", "_num_samples", "_rewrite", "_runner", "_session", "_turns", "episode",
        "last_turn", "messages", "name", "oldest_version",
    )  # fmt: skip

    def __init__(
        self, episode: "Episode", name: str, session: Session, messages: tuple[Message, ...], runner: ToolRunner
    ) -> None:
        self.episode, self.name, self._session, self._runner = episode, name, session, runner
        self.messages: tuple[Message, ...] = ()
        self.last_turn: Turn | None = None
        self._turns: list[TurnRecord] = []
        self._num_samples = 0
        self._last_tool = ""
        """That ran since the last turn."""
        self.oldest_version: int | None = None
        """Of the policy, that sampled for it."""
        self._fork: Fork | None = None
        self._rewrite: Rewrite | None = None
        self._is_opened = False
        """The prompt has been rendered."""
        self._hear(messages)

    def __repr__(self) -> str:
        return f"<Agent {self.name!r} of {self.episode!r}, {len(self._turns)} turns>"

    @property
    def tokens(self) -> Tokens:
        return self._session.tokens

    async def sample(self, *messages: Message) -> Turn:
        """See `agentrt.env.environment.Agent.sample`."""
        budget = self.episode.budget
        self.episode.raise_if_ended()
        self._hear(messages)
        new = messages if self._is_opened else self.messages
        observed = await rendered(lambda: self._render(messages), new)
        context = len(self.tokens) + len(observed)
        granted = budget.grant(context)
        if granted is StopReason.CONTEXT_LENGTH and not self._is_opened:
            raise EnvironmentFailure(self._too_long(context, budget.context_length))
        if isinstance(granted, StopReason):
            self.episode.stop(granted)
        self._is_opened = True
        self._num_samples += 1
        request = self._session.sample(observed, self.episode.setup.params, max_tokens=granted)
        del observed  # a long prompt is not kept twice while the turn waits
        self.episode.enter("model")
        try:
            with self.episode.under_way(), attributed_to(EngineFailure, "the engine failed"):
                completion = await self._in_time(request)
        except BaseException:
            self._keep_partial(context)
            raise
        finally:
            self.episode.enter("environment")
            budget.settle(granted, max(0, len(self.tokens) - context))
        return self._taken(completion, granted)

    async def call(self, *calls: ToolCall) -> list[Message]:
        """See `agentrt.env.environment.Agent.call`."""
        episode, turn = self.episode, len(self._turns) - 1
        episode.require_running()
        reason = episode.budget.admit(len(calls))
        if reason is not None:
            episode.stop(reason)
        tools = episode.setup.tools
        records = [tool_calls.before(call, tools, self.name, turn) for call in calls]
        running = next((record for record in records if record.outcome == tool_calls.CANCELLED), None)
        seconds = episode.setup.limits.tool_seconds
        if running is not None:
            self._session.hint(episode.hints())
            self._session.pause(running.name, ",".join(sorted(running.arguments)), seconds)
            self._last_tool = running.name
            episode.enter("tools", running.name)
        started = clock.now()
        try:
            with episode.under_way():
                await tool_calls.run_calls(calls, tools, self._runner, seconds, records, self._session.progress)
        finally:
            self._session.resume()
            episode.enter("environment")
            episode.timing.tools += clock.now() - started
            episode.note_calls(records)
        return [
            Message("tool", record.result, name=call.name, call_id=call.id)
            for call, record in zip(calls, records, strict=True)
        ]

    def fork(self, name: str) -> "Agent":
        """See `agentrt.env.environment.Agent.fork`."""
        agent = self.episode.opened(name, self._session.fork(), self.messages, self._runner.fork())
        agent._fork, agent._is_opened = Fork(self.name, len(self.tokens)), self._is_opened
        agent.last_turn = self.last_turn
        return agent

    def rewrite(self, name: str, *messages: Message) -> "Agent":
        """See `agentrt.env.environment.Agent.rewrite`."""
        setup = self.episode.setup
        reason = rewrites(setup.renderer, self.messages, messages, setup.environment.tools)
        if not reason:
            raise ValueError("these messages continue the branch as it is; give what is new to `sample`")
        agent = self.episode.agent(name, *messages)
        agent._runner = self._runner
        agent._rewrite = Rewrite(self.name, reason)
        return agent

    def record(self) -> BranchRecord:
        """The branch as it is stored."""
        return branch_record(self.name, self.tokens, self._turns, self._fork, self._rewrite)

    def _hear(self, messages: tuple[Message, ...]) -> None:
        for message in messages:
            if not isinstance(message, Message):
                raise TypeError(f"a message is a Message(role, content), not a {type(message).__name__}")
            msgspec.json.encode(message)  # what cannot be stored ends here, before it is in a record
        self.messages = (*self.messages, *messages)

    def _render(self, messages: tuple[Message, ...]) -> Sequence[int]:
        setup, tokens = self.episode.setup, self.tokens
        if not self._is_opened:
            return setup.renderer.prompt(self.messages, setup.environment.tools)
        last = tokens.token_ids[-1]
        if tokens.mask[-1] == 1 and last in setup.renderer.stop_token_ids:
            return setup.renderer.join(messages, ended=True, end_id=last)
        return setup.renderer.join(messages, ended=False)

    async def _in_time(self, request: Awaitable[Completion]) -> Completion:
        """The completion, or `EngineFailure` after `limits.turn_seconds`."""
        seconds = self.episode.setup.limits.turn_seconds
        if seconds is None:
            return await request
        with anyio.move_on_after(seconds):
            return await request
        raise EngineFailure(
            f"a turn was not done after limits.turn_seconds ({seconds:g} s); raise it, or use fewer episodes"
        )

    def _too_long(self, tokens: int, context_length: int) -> str:
        return (
            f"the prompt of agent {self.name!r} has {tokens} tokens and the model's context only {context_length}, which "
            "leaves no room for a turn; shorten the task or the tool list, or use a model with a longer context"
        )

    def _taken(self, completion: Completion, granted: int) -> Turn:
        """Note a completion and read it as a turn."""
        if completion.finish_reason == "abort":
            self._keep_partial(completion.context_tokens)
            raise EngineFailure("the engine aborted a turn")
        record = turn_record(completion)
        self._turns.append(record)
        setup = self.episode.setup
        parsed = setup.renderer.parse(completion.token_ids, completion.finish_reason, setup.environment.tools)
        cut_by = self.episode.budget.cut_by(granted) if parsed.is_cut else None
        turn = msgspec.structs.replace(parsed, start=record.start, end=record.end, cut_by=cut_by)
        self.messages = (*self.messages, turn.message)
        self.last_turn = turn
        self.episode.note_turn(turn)
        self.episode.timing.add(completion)
        self.episode.kv.add(completion, self._last_tool)
        self._last_tool = ""
        oldest = min(completion.versions, default=self.oldest_version)
        if oldest is not None:
            self.oldest_version = oldest if self.oldest_version is None else min(oldest, self.oldest_version)
        return turn

    def _keep_partial(self, context: int) -> None:
        """Record what was sampled of a turn that did not end."""
        end = len(self.tokens)
        if end > context:
            seed = seeds.derive(self._session.seed, "turn", self._num_samples - 1)
            self._turns.append(TurnRecord(start=context, end=end, seed=seed, finish_reason="abort"))
