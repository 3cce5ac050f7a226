"""`RemoteEngine`: sessions over servers. The ids live here; a server that is lost costs a turn's delay, no episode.

    session ── ids, turn ──► router ──► server ── pieces ──► tokens
                 ▲                        │ lost, aborted
                 └────── what is left ────┘

What a server gave before it was lost or paused stays; the rest of the turn is asked of the next one, with what is left of
its budget. So no sampled id is lost and none is sampled twice.
"""

import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import httpx
import msgspec
import structlog

from agentrt.core import clock, seeds
from agentrt.core.errors import EngineFailure, InvalidToken, RequestError, UsageError, WeightsError
from agentrt.core.protocol import (
    Completion,
    DeviceWeights,
    EngineInfo,
    EngineStatistics,
    FinishReason,
    Grammar,
    SessionHints,
    SharedWeights,
    UpdateMode,
    UpdateReport,
    WeightSource,
)
from agentrt.core.spec import SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.core.tokens import Floats, Ids, Tokens
from agentrt.engine.remote.line import Line
from agentrt.engine.remote.router import Request, Who, choose, is_at_home
from agentrt.engine.remote.server import CONNECT_SECONDS, Server, ServerLost
from agentrt.engine.remote.wire import Asked, Piece, needs_law
from agentrt.engine.request import Bounds, check_request
from agentrt.engine.stopping import StopStrings

LOST_SECONDS = 120.0
"""How long a turn waits for any server to come back."""
RETRY_SECONDS = 1.0
FRUITLESS = 8
"""Requests in a row for a turn that end without an id, beside one for each server, after which the turn has failed."""
SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
        if hasattr(socket, name)
    ),
]
"""A turn may be silent for long, so there is no time-out: a machine that is gone is known by its system's silence."""
EXPECTED_TOKENS = 128.0
"""Of a turn, for the router."""

log = structlog.get_logger(__name__)


class RemoteEngine:
    """`core.protocol.Engine` over servers. An async context manager: it owns the connections.

    Entering it probes every server; a caller that did so before gives the `info` it found. Servers with older weights
    than `oldest_version` are not asked.
    """

    def __init__(
        self,
        urls: Sequence[str],
        tokenizer: Tokenizer,
        *,
        api_key: str = "",
        info: EngineInfo | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_SECONDS), trust_env=False,
            transport=transport
            or httpx.AsyncHTTPTransport(limits=limits, trust_env=False, socket_options=SOCKET_OPTIONS),
        )  # fmt: skip
        self.servers = [Server(url, self._http) for url in urls]
        self.tokenizer, self.oldest_version = tokenizer, 0
        self.line, self.num_opened = Line(), 0
        self.num_sessions = self.num_sampled = self.num_prefilled = self.num_reused = 0
        self._info = info
        self.lines: list[str] = []
        """What was found of each server, for people."""

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine is entered before it is asked what it serves"
        return self._info

    async def _connect(self) -> None:
        """Probe every server. `UsageError` for one that cannot be used, or is not there."""
        for server in self.servers:
            try:
                await server.probe()
            except ServerLost as error:
                raise UsageError(f"no server answers at {error}; start it, or give another --engine") from error
            except EngineFailure as error:
                raise UsageError(f"{server.url} cannot be used: {error}") from error
            self.lines.append(server.capabilities.line(server.url))
        found = [server.capabilities for server in self.servers]
        if len({one.law for one in found}) > 1:
            raise UsageError("the servers differ in model or in what their logprobs are of; use equal ones")
        self._info = EngineInfo(
            model=found[0].model, model_hash=found[0].model_hash, vocab_size=self.tokenizer.vocab_size,
            context_length=min(one.context_length for one in found), logprobs_of=found[0].logprobs_of,
            kv_tokens=int(room) if math.isfinite(room := min(one.room for one in found)) else 0,
        )  # fmt: skip

    def session(
        self, *, seed: int | None = None, salt: str = "", hints: SessionHints = SessionHints(), turn: int = 0
    ) -> "RemoteSession":
        return RemoteSession(self, seeds.fresh() if seed is None else seed, hints, Tokens(), turn)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            version=max((server.version for server in self.servers), default=0),
            running=sum(server.belief.running for server in self.servers), waiting=len(self.line), sessions=self.num_sessions,
            tokens_sampled=self.num_sampled, tokens_prefilled=self.num_prefilled, tokens_reused=self.num_reused,
        )  # fmt: skip

    async def update_weights(self, version: int, source: WeightSource, mode: UpdateMode = "recompute") -> UpdateReport:
        """Have all servers take them: tensors and shared memory on this machine, or a folder that all of them see.

        `WeightsError` says which servers did not; the others have them. Servers of other kinds take weights from the trainer by
        their own interface.
        """
        if not all("weights" in server.capabilities.updates for server in self.servers):
            raise WeightsError(
                "servers take weights only if they are `agentrt serve --weights FOLDER`; others take them from the trainer by "
                "their own interface: give `version` of each server and `oldest_version` of this engine the new number then"
            )
        with described(source) as said:
            return await self._update_all(version, said, mode)

    async def _update_all(self, version: int, said: Mapping[str, Any], mode: UpdateMode) -> UpdateReport:
        reports, failures = list[UpdateReport](), list[str]()

        async def update(server: Server) -> None:
            try:
                reports.append(await server.update_weights(version, said, mode))
            except WeightsError as error:
                failures.append(str(error))

        async with anyio.create_task_group() as updates:
            for server in self.servers:
                updates.start_soon(update, server)
        if failures:
            raise WeightsError(
                f"{len(failures)} of {len(self.servers)} servers keep their weights: {'; '.join(failures)}"
            )
        return UpdateReport(
            version=version, mode=mode, read_seconds=max(one.read_seconds for one in reports),
            pause_seconds=max(one.pause_seconds for one in reports), requests=sum(one.requests for one in reports),
            tokens_dropped=sum(one.tokens_dropped for one in reports),
        )  # fmt: skip

    async def place(self, request: Request, who: Who, age: int, sticky: str | None) -> Server:
        """The server for a request. Waits for room, older conversations first, and while all are lost.

        `EngineFailure` if none comes back, or none is new enough.
        """
        while True:
            there = {server.url: server for server in await self._allowed(request)}
            now = clock.now()
            seen = {
                url: server.belief.candidate(url, who, request.tokens, now, server.version)
                for url, server in there.items()
            }
            name = choose(request, list(seen.values()), sticky=sticky)
            if name is not None and (not self.line.is_behind(age) or is_at_home(request, seen[name], sticky)):
                self.line.look()
                return there[name]
            await self.line.wait(age)

    async def _allowed(self, request: Request) -> list[Server]:
        """The servers that may serve a request: one or more, when they are there."""
        deadline = clock.now() + LOST_SECONDS
        while True:
            there = [server for server in self.servers if not server.is_lost]
            if able := [server for server in there if server.version >= request.oldest_version]:
                return able
            if len(there) == len(self.servers):
                versions = ", ".join(f"{server.url} has {server.version}" for server in self.servers)
                raise EngineFailure(f"no server has weights of version {request.oldest_version} or newer: {versions}")
            if clock.now() > deadline:
                raise EngineFailure(
                    f"no server came back within {LOST_SECONDS:g} s: {', '.join(s.url for s in self.servers)}"
                )
            await anyio.sleep(RETRY_SECONDS)

    def lose(self, server: Server, error: ServerLost) -> None:
        """Ask this server no more until it answers a probe."""
        if not server.is_lost:
            server.is_lost = True
            server.belief.flush()
            log.warning("server_lost", url=server.url, error=str(error))
            self._lost.start_soon(self._look_for, server)

    async def _look_for(self, server: Server) -> None:
        """Probe a lost server until it is back. It is done once for all who wait for it, and though nobody has to."""
        said = ""
        while True:
            await anyio.sleep(RETRY_SECONDS)
            why = await server.why_away()
            if not why:
                break
            if why != said:
                log.info("server_away", url=server.url, why=why)
            said = why
        server.is_lost = False
        self.line.look()
        log.warning("server_back", url=server.url, version=server.version, oldest=self.oldest_version)

    async def __aenter__(self) -> Self:
        try:
            await self._connect()
        except BaseException:
            await self._http.aclose()
            raise
        self._lost = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lost.cancel_scope.cancel()
        try:
            await self._lost.__aexit__(None, None, None)
        finally:
            with anyio.CancelScope(shield=True):
                await self._http.aclose()


class RemoteSession:
    """`core.protocol.Session` over a `RemoteEngine`."""

    def __init__(self, engine: RemoteEngine, seed: int, hints: SessionHints, tokens: Tokens, turns: int) -> None:
        self._engine, self._seed, self._hints, self._tokens, self._turns = engine, seed, hints, tokens, turns
        self._forks = 0
        self._age, engine.num_opened = engine.num_opened, engine.num_opened + 1
        self._key = f"session {self._age}"
        self._prompt = 0
        """Ids of its first prompt, which its group shares."""
        self._server: Server | None = None
        """Where its last turn was, and it stays."""

    def __repr__(self) -> str:
        return f"<RemoteSession {len(self._tokens)} ids, {self._turns} turns, at {self._server!r}>"

    @property
    def tokens(self) -> Tokens:
        return self._tokens

    @property
    def seed(self) -> int:
        return self._seed

    async def sample(
        self,
        observed_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        progress: Callable[[], None] | None = None,
        grammar: Grammar | None = None,
    ) -> Completion:
        asked = {"grammar": grammar, "bad_words": params.bad_words, "top_logprobs": params.top_logprobs}
        if local := [name for name, value in asked.items() if value]:
            raise RequestError(
                f"{' and '.join(local)}: only the engine in this process has these; leave engine.urls out"
            )
        info = self._engine.info
        bounds = Bounds(info.vocab_size, info.context_length, info.context_length)
        check_request(observed_ids, len(self._tokens), params, max_tokens, bounds)
        if wrong := needs_law(params, info.logprobs_of):
            raise RequestError(
                f"the server's logprobs are {info.logprobs_of}, which with {wrong} are not those of the law that is sampled "
                "from; leave these out, or have the server return processed logprobs (vLLM: --logprobs-mode processed_logprobs)"
            )
        self._tokens.observe(observed_ids)
        turn = _Turn(self._tokens, params, max_tokens, self._engine, progress)
        self._prompt = self._prompt or turn.context
        number, self._turns = self._turns, self._turns + 1
        turn_seed = seeds.derive(self._seed, "turn", number)
        started, fruitless = clock.now(), 0
        while turn.finish_reason is None:
            before = turn.sampled
            # A server that keys noise by the place in its reply would give the rest of a turn that of the turn's beginning.
            own = seeds.derive(turn_seed, "rest", before) if before else turn_seed
            await self._ask(turn, Asked(self._tokens.token_ids, turn.left(), turn.room, self._seed, number, own))
            fruitless = 0 if turn.sampled > before else fruitless + 1
            if fruitless and turn.finish_reason is None:
                if fruitless > FRUITLESS + len(self._engine.servers):
                    raise EngineFailure(
                        f"{fruitless} requests in a row for a turn gave no id, the last at {self._server}"
                    )
                await anyio.sleep(RETRY_SECONDS)
        return turn.completion(turn_seed, clock.now() - started)

    async def _ask(self, turn: "_Turn", asked: Asked) -> None:
        """Have one server go on with a turn, as far as it comes."""
        engine, group = self._engine, self._hints.group
        who = Who(self._key, f"group {group}", self._prompt) if group else Who(self._key)
        expected = min(EXPECTED_TOKENS, asked.max_tokens)
        request = Request(
            len(asked.token_ids), expected, growth=expected, oldest_version=engine.oldest_version,
            tie=self._seed % 1_000_003,
        )  # fmt: skip
        server = await engine.place(request, who, self._age, self._server.url if self._server is not None else None)
        self._move(server)
        visit = server.belief.begin(who, request.tokens, clock.now())
        first, cached = True, None

        def take(piece: Piece) -> None:
            nonlocal first, cached
            if first:
                first = False
                server.belief.began(visit)
            cached = piece.cached_tokens if piece.cached_tokens is not None else cached
            turn.take(piece, server)

        try:
            await server.generate(asked, take)
        except ServerLost as lost:
            engine.lose(server, lost)
        finally:
            if first:
                server.belief.began(visit)
            server.belief.end(visit, cached, len(self._tokens), clock.now())
            engine.line.look()
        turn.note_cached(cached)

    def _move(self, server: Server | None) -> None:
        """It is there from now on, or nowhere."""
        if self._server is not None and self._server is not server:
            self._server.belief.leave(self._key)
        self._server = server

    async def score(self, observed_ids: Sequence[int], scored_ids: Sequence[int], params: SamplingParams) -> Floats:
        raise RequestError("ids are scored by the engine in this process only; leave --engine out")

    def hint(self, hints: SessionHints) -> None:
        self._hints = hints

    def pause(self, tool: str, arguments: str = "", deadline: float | None = None) -> None:
        """Servers keep what they cache by rules of their own."""

    def progress(self, eta_seconds: float) -> None:
        """As `pause`."""

    def resume(self) -> None:
        """As `pause`."""

    def fork(self) -> "RemoteSession":
        seed = seeds.derive(self._seed, "fork", self._forks)
        child = RemoteSession(self._engine, seed, self._hints, self._tokens.copy(), 0)
        child._server, child._prompt = self._server, self._prompt
        self._forks += 1
        return child

    def __enter__(self) -> Self:
        self._engine.num_sessions += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.num_sessions -= 1
        self._move(None)
        for server in self._engine.servers:
            server.belief.forget(self._key)
        self._engine.line.look()


class _Turn:
    """One turn while it is sampled, by one server or by several."""

    def __init__(
        self,
        tokens: Tokens,
        params: SamplingParams,
        max_tokens: int,
        engine: RemoteEngine,
        progress: Callable[[], None] | None,
    ) -> None:
        self._tokens, self._params, self._max_tokens, self._engine = tokens, params, max_tokens, engine
        self._tell = progress or (lambda: None)
        self.context = len(tokens)
        self._stops = StopStrings(params.stop)
        self._cached: int | None = None
        self._extra: tuple[Floats, Floats] = (Floats(), Floats())
        self._matched: int | str | None = None
        self._seed: int | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def sampled(self) -> int:
        return len(self._tokens) - self.context

    @property
    def room(self) -> int:
        """What is left of `max_tokens`."""
        return self._max_tokens - self.sampled

    def left(self) -> SamplingParams:
        """The law for what is left. `EngineFailure` if a server could not know what the turn said already."""
        if self.sampled and (self._params.presence_penalty or self._params.frequency_penalty):
            raise EngineFailure(
                "a turn with penalties on its own output broke off, and no other server can go on with it"
            )
        return msgspec.structs.replace(self._params, min_tokens=max(self._params.min_tokens - self.sampled, 0))

    def take(self, piece: Piece, server: Server) -> None:
        """Commit a piece: every id with its logprob and the version that the server says."""
        engine = self._engine
        versions = piece.versions if piece.versions is not None else [server.version] * len(piece.token_ids)
        for token_id, logprob, version in zip(piece.token_ids, piece.logprobs, versions, strict=True):
            if not 0 <= token_id < engine.info.vocab_size:
                last = engine.info.vocab_size - 1
                raise InvalidToken(f"the server sampled id {token_id}, and the tokenizer's ids end at {last}")
            if self.finish_reason is not None or not self.room:
                raise EngineFailure(f"the server sampled on after the end of a turn, at id {token_id}")
            self._tokens.commit(token_id, logprob, version)
            engine.num_sampled += 1
            matched = token_id if token_id in self._params.stop_token_ids else self._stops.feed(
                engine.tokenizer.bytes_of(token_id) if self._params.stop else b""
            )  # fmt: skip
            if matched is not None:
                self.finish_reason, self._matched = "stop", matched
        if versions:
            server.version = versions[-1]
        for values, more in zip(self._extra, (piece.raw_logprobs, piece.kept_logmass), strict=True):
            values.extend(more)
        self._seed = piece.seed if piece.seed is not None else self._seed
        if self.finish_reason is None:
            if not self.room:
                self.finish_reason = "length"
            elif piece.finish_reason == "stop":
                self.finish_reason, self._matched = "stop", piece.matched_stop
            elif piece.finish_reason == "length":
                raise EngineFailure(f"the server ended a turn by its length with {self.room} ids of its budget left")
        self._tell()

    def note_cached(self, cached: int | None) -> None:
        """What the first server had of the prompt counts; what a second one has was computed by the first."""
        self._cached = cached if self._cached is None else self._cached

    def completion(self, seed: int, seconds: float) -> Completion:
        """The whole turn."""
        start, tokens, engine = self.context, self._tokens, self._engine
        cached = self._cached or 0
        engine.num_reused += cached
        engine.num_prefilled += start - cached
        assert self.finish_reason is not None
        raw, mass = self._extra if all(len(values) == self.sampled for values in self._extra) else (Floats(), Floats())
        return Completion(
            token_ids=Ids(tokens.token_ids[start:]), logprobs=Floats(tokens.logprobs[start:]),
            versions=Ids(tokens.versions[start:]), raw_logprobs=raw, kept_logmass=mass,
            finish_reason=self.finish_reason, matched_stop=self._matched, seed=seed if self._seed is None else self._seed,
            context_tokens=start, cached_tokens=cached, decode_seconds=seconds,
        )  # fmt: skip


@contextmanager
def described(source: WeightSource) -> Iterator[dict[str, Any]]:
    """Weights as a server is told of them, while the scope lasts: tensors are in shared memory then."""
    match source:
        case Path():
            yield {"folder": str(source.resolve())}
        case SharedWeights():
            yield {"memory": msgspec.to_builtins(source)}
        case DeviceWeights():
            yield {"device_memory": msgspec.to_builtins(source)}
        case Mapping():
            from agentrt.engine.weights import shared_weights  # here, because it imports torch

            with shared_weights(source) as shared:
                yield {"memory": msgspec.to_builtins(shared)}
        case _:
            raise WeightsError("servers take tensors by name, shared memory or a folder, not a broadcast")
