"""`ScriptedEngine`: an engine that answers from a script, for tests of everything above the engine.

It keeps the contract of `agentrt.core.protocol`: append-only ids, seeds by turn, `max_tokens`, end ids, partial turns
after a cancellation. Time passes only where the script says so, on the loop's clock, so it runs in virtual time.
"""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import anyio
import anyio.lowlevel

from agentrt.core import seeds
from agentrt.core.errors import RequestError
from agentrt.core.protocol import (
    Completion,
    EngineInfo,
    EngineStatistics,
    FinishReason,
    Grammar,
    SessionHints,
    UpdateMode,
    UpdateReport,
    WeightSource,
)
from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import Floats, Ids, Tokens


class Answer(NamedTuple):
    """One scripted turn."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    """As many as ids; by default all are `ScriptedEngine.LOGPROB`."""
    seconds: float = 0.0
    """How long it takes, spread evenly over the ids."""


Script = Sequence[Sequence[int] | Answer] | Callable[[Sequence[int]], Sequence[int] | Answer]
"""Turn n of every session gives item n; or a function of all ids so far gives the turn."""


class Request(NamedTuple):
    """What the engine was asked."""

    context_tokens: int
    """The session's ids, the observed ones counted."""
    observed_ids: Sequence[int]
    max_tokens: int
    params: SamplingParams


class ScriptedEngine:
    """`core.protocol.Engine` over a script."""

    LOGPROB = -0.5

    def __init__(
        self,
        script: Script,
        *,
        context_length: int = 4096,
        vocab_size: int = 512,
        keep_requests: bool = True,
        decode: Callable[[Iterable[int]], str] | None = None,
    ) -> None:
        """`decode` is needed for stop strings: without it there are none."""
        self.script, self.version = script, 0
        """Every sampled id gets `version`; a test may raise it at any time."""
        self.requests: list[Request] = []
        self.keep_requests, self.decode = keep_requests, decode
        self.pauses: list[str] = []
        """The tools that sessions paused for."""
        self.etas: list[float] = []
        """What sessions said of the progress of these tools."""
        self.num_sessions = 0
        """Open sessions: 0 after a test, or one was not left."""
        self._info = EngineInfo(
            model="scripted", model_hash="scripted", vocab_size=vocab_size, context_length=context_length
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def session(
        self, *, seed: int | None = None, salt: str = "", hints: SessionHints = SessionHints(), turn: int = 0
    ) -> "ScriptedSession":
        return ScriptedSession(self, seeds.fresh() if seed is None else seed, Tokens(), turn)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(version=self.version, sessions=self.num_sessions)

    async def update_weights(self, version: int, source: WeightSource, mode: UpdateMode = "recompute") -> UpdateReport:
        """Only the version changes."""
        await anyio.lowlevel.checkpoint()
        self.version = version
        return UpdateReport(
            version=version, mode=mode, read_seconds=0, pause_seconds=0, requests=0, tokens_dropped=0
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class ScriptedSession:
    """`core.protocol.Session` of a `ScriptedEngine`."""

    __slots__ = ("_engine", "_forks", "_turns", "seed", "tokens")

    def __init__(self, engine: ScriptedEngine, seed: int, tokens: Tokens, turns: int) -> None:
        self._engine, self.seed, self.tokens, self._turns, self._forks = engine, seed, tokens, turns, 0

    async def sample(
        self,
        observed_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        grammar: Grammar | None = None,
        progress: Callable[[], None] | None = None,
    ) -> Completion:
        engine, tokens = self._engine, self.tokens
        cached, context = len(tokens), len(tokens) + len(observed_ids)
        if max_tokens < 1 or context + max_tokens > engine.info.context_length:
            raise RequestError(
                f"{context} ids and max_tokens {max_tokens} do not fit the context of {engine.info.context_length}"
            )
        if engine.keep_requests:
            engine.requests.append(Request(context, tuple(observed_ids), max_tokens, params))
        tokens.observe(observed_ids)
        del observed_ids
        turn, self._turns = self._turns, self._turns + 1
        given = engine.script(tokens.token_ids) if callable(engine.script) else engine.script[turn]
        answer = given if isinstance(given, Answer) else Answer(given)
        matched = await self._commit(answer, params, max_tokens, progress or _no_progress)
        is_cut = matched is None and len(answer.token_ids) > len(tokens) - context
        reason: FinishReason = "length" if is_cut else "stop"
        return Completion(
            token_ids=Ids(tokens.token_ids[context:]), logprobs=Floats(tokens.logprobs[context:]),
            versions=Ids(tokens.versions[context:]), finish_reason=reason, matched_stop=matched,
            seed=seeds.derive(self.seed, "turn", turn), context_tokens=context, cached_tokens=cached,
            decode_seconds=answer.seconds,
        )  # fmt: skip

    async def _commit(
        self, answer: Answer, params: SamplingParams, max_tokens: int, progress: Callable[[], None]
    ) -> int | str | None:
        """Commit the answer's ids up to what ends them or `max_tokens`; the end id or stop string, if it came to one."""
        ids = list(answer.token_ids[:max_tokens])
        end, matched = min(self._ends(ids, params), default=(len(ids), None))
        ids = ids[:end]
        logprobs = answer.logprobs[: len(ids)] or [ScriptedEngine.LOGPROB] * len(ids)
        if not answer.seconds:
            await anyio.lowlevel.checkpoint()
            self.tokens.commit_all(ids, logprobs, self._engine.version)
        else:
            for token_id, logprob in zip(ids, logprobs, strict=True):
                await anyio.sleep(answer.seconds / len(answer.token_ids))
                self.tokens.commit(token_id, logprob, self._engine.version)
                progress()
        return matched

    def _ends(self, ids: Sequence[int], params: SamplingParams) -> Iterable[tuple[int, int | str]]:
        """How many ids there are with each end id or stop string among them."""
        yield from ((ids.index(one) + 1, one) for one in params.stop_token_ids if one in ids)
        decode = self._engine.decode
        if decode is not None:
            lengths = range(1, len(ids) + 1)
            for stop in params.stop:
                yield from ((length, stop) for length in lengths if stop in decode(ids[:length]))

    async def score(self, observed_ids: Sequence[int], scored_ids: Sequence[int], params: SamplingParams) -> Floats:
        await anyio.lowlevel.checkpoint()
        self.tokens.observe([*observed_ids, *scored_ids])
        return Floats([ScriptedEngine.LOGPROB] * len(scored_ids))

    def hint(self, hints: SessionHints) -> None:
        """Hints change nothing of what is sampled."""

    def pause(self, tool: str, arguments: str = "", deadline: float | None = None) -> None:
        if self._engine.keep_requests:
            self._engine.pauses.append(tool)

    def progress(self, eta_seconds: float) -> None:
        if self._engine.keep_requests:
            self._engine.etas.append(eta_seconds)

    def resume(self) -> None:
        """There is no KV to bring back."""

    def fork(self) -> "ScriptedSession":
        self._forks += 1
        seed = seeds.derive(self.seed, "fork", self._forks)
        return ScriptedSession(self._engine, seed, self.tokens.copy(), self._turns)

    def __enter__(self) -> Self:
        self._engine.num_sessions += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.num_sessions -= 1


def _no_progress() -> None:
    pass
