"""`Metered`: the sessions that a program has in an episode. Its turns are the episode's: they count, and its law samples them.

What a request says of the law (temperature, seed, penalties) is not read: a run's tokens come from the run's law. Where a
turn may end sooner (`stop`, `max_tokens`) the request is heard, within what the limits leave.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import anyio
import msgspec

from agentrt.core.protocol import Completion, EngineInfo, EngineStatistics, Grammar, Session, SessionHints
from agentrt.core.records import StopReason
from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import Floats, Tokens
from agentrt.rollout.episode import Episode
from agentrt.serve.requests import BadRequest


class Metered:
    """What a conversation needs of an engine, for one episode; borrows it."""

    def __init__(self, episode: Episode) -> None:
        self._engine, self.episode = episode.setup.engine, episode
        self.ended: StopReason | None = None
        """The limit that left no room for a turn that was asked for."""
        self.end = anyio.Event()
        """Set with it."""
        self.last: MeteredSession | None = None
        """That sampled last."""

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def statistics(self) -> EngineStatistics:
        return self._engine.statistics()

    def session(
        self, *, seed: int | None = None, salt: str = "", hints: SessionHints = SessionHints(), turn: int = 0
    ) -> "MeteredSession":
        """As of `agentrt.core.protocol.Engine`; what the episode knows is the hint."""
        return MeteredSession(self, self._engine.session(seed=seed, salt=salt, hints=self.episode.hints(), turn=turn))

    def grant(self, context: int) -> int:
        """`max_tokens` of a turn; `BadRequest`, and the end of the episode, if there can be none."""
        granted = self.episode.budget.grant(context)
        if isinstance(granted, StopReason):
            self.ended = self.ended or granted
            self.end.set()
            raise BadRequest(f"the episode has ended: {granted}", status=403)
        return granted


class MeteredSession:
    """`core.protocol.Session` over one of the engine's, which it owns from entering to leaving."""

    def __init__(self, engine: Metered, session: Session) -> None:
        self._engine, self._session = engine, session
        self.cut_by: StopReason | None = None
        """The limit that cut its last turn."""

    @property
    def tokens(self) -> Tokens:
        return self._session.tokens

    @property
    def seed(self) -> int:
        return self._session.seed

    async def sample(
        self,
        observed_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        grammar: Grammar | None = None,
        progress: Callable[[], None] | None = None,
    ) -> Completion:
        """A turn of the episode, under its law and within its limits."""
        episode, context = self._engine.episode, len(self.tokens) + len(observed_ids)
        granted = self._engine.grant(context)
        episode.enter("model")
        try:
            completion = await self._session.sample(
                observed_ids, _law(episode.setup.params, params), max_tokens=min(max_tokens, granted), grammar=grammar,
                progress=progress,
            )  # fmt: skip
        finally:
            episode.enter("environment")
            sampled = max(0, len(self.tokens) - context)
            episode.budget.settle(granted, sampled)
            if sampled:
                self._engine.last = self
        is_cut = completion.finish_reason == "length" and max_tokens >= granted
        self.cut_by = episode.budget.cut_by(granted) if is_cut else None
        episode.timing.add(completion)
        episode.kv.add(completion, "")
        return completion

    async def score(self, observed_ids: Sequence[int], scored_ids: Sequence[int], params: SamplingParams) -> Floats:
        return await self._session.score(observed_ids, scored_ids, params)

    def hint(self, hints: SessionHints) -> None:
        self._session.hint(hints)

    def pause(self, tool: str, arguments: str = "", deadline: float | None = None) -> None:
        self._session.pause(tool, arguments, deadline)

    def progress(self, eta_seconds: float) -> None:
        self._session.progress(eta_seconds)

    def resume(self) -> None:
        self._session.resume()

    def fork(self) -> "MeteredSession":
        return MeteredSession(self._engine, self._session.fork())

    def __enter__(self) -> Self:
        self._session.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)


def _law(law: SamplingParams, asked: SamplingParams) -> SamplingParams:
    """The run's law, with what ends a turn in the request as well."""
    return msgspec.structs.replace(
        law, stop=tuple(dict.fromkeys((*law.stop, *asked.stop))), top_logprobs=asked.top_logprobs,
        stop_token_ids=tuple(dict.fromkeys((*law.stop_token_ids, *asked.stop_token_ids))),
    )  # fmt: skip
