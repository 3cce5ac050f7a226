"""`Choice`: one sample of a request, from its open turn to what its client gets of it, whole or in deltas."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import anyio

from agentrt.core.errors import AgentrtError
from agentrt.core.protocol import Completion, Grammar
from agentrt.core.spec import SamplingParams
from agentrt.env.chat.message import Turn
from agentrt.serve.conversation import OpenTurn
from agentrt.serve.logprobs import Sampled
from agentrt.serve.view import Seen, View


class Delta(NamedTuple):
    """What is new of a choice since the last delta."""

    choice: int
    seen: Seen
    sampled: Sampled
    versions: list[int]
    ended: "Ended | None" = None
    """Set in the last one."""


class Ended(NamedTuple):
    """How a choice ended."""

    turn: Turn
    reason: str
    completion: Completion


class Choice:
    """Sampled once, by `play`. `keeps_message`: its turn is a message that its client may go on from."""

    def __init__(
        self,
        index: int,
        turn: OpenTurn,
        view: View,
        params: SamplingParams,
        max_tokens: int,
        *,
        keeps_message: bool,
        grammar: Grammar | None = None,
    ) -> None:
        self.index, self._turn, self._view, self._params, self._max_tokens = index, turn, view, params, max_tokens
        self._keeps_message, self._grammar = keeps_message, grammar
        self._at, self._is_over, self._grown = turn.context, False, anyio.Event()

    async def play(self, tell: Callable[[Delta], Awaitable[None]] | None = None) -> Delta:
        """Sample the turn and return its last delta. `tell` is given those before it, as they come.

        A slow listener gets fewer and larger ones: the engine does not wait for it. The most likely ids are known at the
        end of the turn, so if they are asked for there is one delta only.
        """
        if self._params.top_logprobs:
            tell = None
        async with anyio.create_task_group() as group:
            if tell is not None:
                group.start_soon(self._follow, tell)
            last: Delta | AgentrtError
            try:  # it is kept at once: the listener that is waited for here may go away
                last = self._last(await self._turn.sample(self._params, self._max_tokens, self._wake, self._grammar))
            except AgentrtError as error:  # raised below, for a task group would wrap it
                last = error
            self._is_over = True
            self._grown.set()
        if isinstance(last, AgentrtError):
            raise last
        return last

    async def _follow(self, tell: Callable[[Delta], Awaitable[None]]) -> None:
        while not self._is_over:
            await self._grown.wait()
            self._grown = anyio.Event()
            if not self._is_over:
                await tell(self._next(len(self._turn.branch.tokens.versions)))

    def _wake(self) -> None:
        if len(self._turn.branch.tokens.versions) > self._at:
            self._grown.set()

    def _next(self, end: int) -> Delta:
        """What was sampled up to `end`; versions are written last, so the other arrays are as long."""
        tokens, start, self._at = self._turn.branch.tokens, self._at, end
        ids = tokens.token_ids[start:end].tolist()
        sampled = Sampled(ids, tokens.logprobs[start:end].tolist())
        return Delta(self.index, self._view.feed(ids), sampled, tokens.versions[start:end].tolist())

    def _last(self, completion: Completion) -> Delta:
        delta = self._next(completion.context_tokens + len(completion.token_ids))
        rest, turn, reason = self._view.finish(completion)
        self._turn.keep(completion, turn.message if self._keeps_message else None)
        seen = Seen(delta.seen.reasoning + rest.reasoning, delta.seen.content + rest.content)
        sampled = delta.sampled._replace(tops=completion.top_logprobs)
        return delta._replace(seen=seen, sampled=sampled, ended=Ended(turn, reason, completion))
