"""The engine's async door: sessions on the event loop, steps in one thread of their own.

    loop:   Session.sample ── command ──►  deque ─┐                  ┌─ awaits its Event
    thread:                                       └► core.step() ────┴─ finished ──► deque, one byte to a socket

The loop never waits for a step and the thread never waits for the loop: commands are applied between steps, and what ended
is announced by one byte on a socket pair, whatever the number of sequences. A session's `tokens` have one writer at a time:
the loop between requests, the step thread during one.
"""

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

import anyio
import anyio.abc

from agentrt.core import clock, seeds
from agentrt.core.errors import EngineFailure, RequestError, WeightsError
from agentrt.core.protocol import (
    Completion,
    EngineInfo,
    EngineStatistics,
    Grammar,
    SessionHints,
    UpdateMode,
    UpdateReport,
    WeightSource,
)
from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import MOST_VERSION, Floats, Ids, Tokens
from agentrt.engine.kv.lease import Lease
from agentrt.engine.request import Bounds, check_ids, check_request
from agentrt.engine.sequence import Sequence as EngineSequence
from agentrt.engine.step import EngineCore
from agentrt.engine.update import Update
from agentrt.engine.weights import Install

ABORT_SECONDS = 30.0
"""How long a cancelled request waits for the step in flight, so that what it sampled is in the record."""

Command = Callable[[], None]


class EngineService:
    """`core.protocol.Engine` over an `EngineCore` in this process. An async context manager: it owns the step thread."""

    def __init__(self, core: EngineCore, info: EngineInfo) -> None:
        self.core, self._info = core, info
        self.bounds = Bounds(info.vocab_size, info.context_length, core.cache.num_tokens)
        self.num_sessions = 0
        self._commands: deque[Command] = deque()
        self._finished: deque[EngineSequence | Update] = deque()
        self._waiting: dict[EngineSequence | Update, anyio.Event] = {}
        self._watching: dict[EngineSequence, anyio.Event] = {}
        """Set after each step for those who want to know when a sequence may have grown."""
        self._updates = anyio.Lock()
        self._turn = threading.Condition()
        self._state: Literal["not entered", "open", "closed"] = "not entered"
        self._crash: BaseException | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    def session(
        self, *, seed: int | None = None, salt: str = "", hints: SessionHints = SessionHints(), turn: int = 0
    ) -> "LocalSession":
        session = LocalSession(self, seeds.fresh() if seed is None else seed, salt, hints)
        session._turns = turn
        return session

    def statistics(self) -> EngineStatistics:
        return self.core.statistics(self.num_sessions)

    def post(self, command: Command) -> None:
        """Have the step thread run `command` before its next step."""
        with self._turn:
            self._commands.append(command)
            self._turn.notify()

    async def run(
        self, session: "LocalSession", sequence: EngineSequence, progress: Callable[[], None] | None = None
    ) -> None:
        """Queue a sequence and wait until it has ended. Cancellation aborts it, and waits for the step in flight; so does
        what `progress` raises."""
        ended = self._waiting[sequence] = anyio.Event()
        try:
            self._raise_crash()
            self.post(lambda: self.core.submit(sequence, session.lease))
            if progress is None:
                await ended.wait()
            else:
                await self._told(sequence, ended, progress)
        except BaseException:
            if self._crash is None:
                self.post(lambda: self.abort(sequence))
                with anyio.move_on_after(ABORT_SECONDS, shield=True):
                    await ended.wait()
            raise
        finally:
            self._waiting.pop(sequence, None)
            self._watching.pop(sequence, None)
        self._raise_crash()

    async def _told(self, sequence: EngineSequence, ended: anyio.Event, progress: Callable[[], None]) -> None:
        """Wait until it has ended, and call `progress` after each step until then: here, so that its error is its caller's."""
        while not ended.is_set():
            grown = self._watching[sequence] = anyio.Event()
            await grown.wait()
            progress()

    def abort(self, sequence: EngineSequence) -> None:
        """In the step thread: end a request, and tell who waits for it. One that has ended already is left alone."""
        if not sequence.is_finished:
            self.core.abort(sequence)
            self._finish([sequence])

    def check_open(self) -> None:
        """Raise `EngineFailure` if there is nobody to answer a request."""
        self._raise_crash()
        if self._state != "open":
            raise EngineFailure(f"the engine is {self._state}: it answers inside its `async with`")

    async def update_weights(self, version: int, source: WeightSource, mode: UpdateMode = "recompute") -> UpdateReport:
        """See `core.protocol.Engine.update_weights`. Cancelled before the weights are installed, it leaves the old ones."""
        async with self._updates:
            self.check_open()
            if version <= self.core.version:
                raise WeightsError(f"version {version} is not above the present one, {self.core.version}")
            if version > MOST_VERSION:
                raise WeightsError(
                    f"version {version} is above {MOST_VERSION}, the greatest that a token is recorded with"
                )
            started = clock.now()
            install = await anyio.to_thread.run_sync(self._staged, source)
            read_seconds = clock.now() - started
            self.check_open()
            update = Update(version=version, mode=mode, install=install)
            await self._carried_out(update)
            return UpdateReport(
                version=version, mode=mode, read_seconds=read_seconds, pause_seconds=update.pause_seconds,
                requests=update.requests, tokens_dropped=update.tokens_dropped,
            )  # fmt: skip

    def _staged(self, source: WeightSource) -> Install:
        """`EngineCore.stage`; whatever goes wrong is a `WeightsError`."""
        try:
            return self.core.stage(source)
        except WeightsError:
            raise
        except Exception as error:  # of the source's maker, or for want of memory
            raise WeightsError(f"the new weights cannot be used: {error!r}") from error

    async def _carried_out(self, update: Update) -> None:
        """Have the step thread make an update, and wait for it."""
        ended = self._waiting[update] = anyio.Event()
        try:
            self._raise_crash()
            self.post(lambda: self.core.begin_update(update))
            await ended.wait()
        except anyio.get_cancelled_exc_class():
            self.post(lambda: self.core.withdraw(update))
            raise
        finally:
            self._waiting.pop(update, None)
        self._raise_crash()
        if update.failure is not None:
            raise WeightsError(f"the new weights could not be installed: {update.failure}") from update.failure
        if not update.is_done:
            raise EngineFailure("the engine ended before its weights were updated")

    async def __aenter__(self) -> Self:
        clock.refuse_in_virtual_time("the engine's step thread")
        self._open()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._thread = threading.Thread(target=self._work, name="agentrt-step", daemon=True)
        self._announcer = await anyio.create_task_group().__aenter__()
        self._announcer.start_soon(self._announce)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._turn:
            self._state = "closed"
            self._turn.notify()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.join, ABORT_SECONDS)
        if self._thread.is_alive():
            self._crash = TimeoutError(f"a step had not ended after {ABORT_SECONDS:g} s")
            self._finished.extend(list(self._waiting))
        else:
            self.core.stop()
        self._announce_finished()
        self._announcer.cancel_scope.cancel()
        try:
            await self._announcer.__aexit__(None, None, None)
        finally:
            self._wake_in.close()
            self._wake_out.close()
        if error is None:
            self._raise_crash()

    def _work(self) -> None:
        """The step thread. A bug in it ends every request with `EngineFailure`, and the service raises it at its end."""
        try:
            while self._apply_commands():
                finished: list[EngineSequence | Update] = [*self.core.step(), *self._updated()]
                if finished or self._watching:
                    self._finish(finished)
            self._abort_all()
        except BaseException as error:
            self._crash = error
            self._finish(list(self._waiting))

    def _apply_commands(self) -> bool:
        """Run what was posted; sleep while there is nothing to do. False when the service closes."""
        with self._turn:
            while not self._commands and self.core.is_idle and self._state == "open":
                self._turn.wait()
            commands = [self._commands.popleft() for _ in range(len(self._commands))]
            is_open = self._state == "open"  # read with the commands: what was posted before the close is carried out
        for command in commands:
            command()
        return is_open

    def _abort_all(self) -> None:
        """The engine closes: nobody waits any longer."""
        for ended in list(self._waiting):
            if isinstance(ended, EngineSequence):
                self.abort(ended)
        self._finish(list(self._waiting))

    def _updated(self) -> list[Update]:
        return [update for update in list(self._waiting) if isinstance(update, Update) and update.is_done]

    def _finish(self, finished: Sequence[EngineSequence | Update]) -> None:
        self._finished.extend(finished)
        with suppress(OSError):  # full: the loop has a byte to read already; closed: a step too late, nobody waits
            self._wake_in.send(b"\0")

    async def _announce(self) -> None:
        """On the loop: set the events of what the step thread finished, and tell those who watch a turn."""
        while True:
            await anyio.wait_readable(self._wake_out)
            self._wake_out.recv(4096)
            self._announce_finished()

    def _announce_finished(self) -> None:
        while self._finished:
            ended = self._waiting.get(self._finished.popleft())
            if ended is not None:
                ended.set()
        for grown in self._watching.values():
            grown.set()

    def _open(self) -> None:
        assert self._state == "not entered", "an engine is entered once"
        self._state = "open"

    def _raise_crash(self) -> None:
        if self._crash is not None:
            raise EngineFailure(f"the engine stopped: {self._crash!r}") from self._crash


class LocalSession:
    """`core.protocol.Session` over an `EngineService`."""

    def __init__(self, service: EngineService, seed: int, salt: str, hints: SessionHints) -> None:
        self._service, self._seed, self._salt, self._hints = service, seed, salt, hints
        self._tokens = Tokens()
        self._parent: LocalSession | None = None
        self._forked_at = 0
        self.lease: Lease  # opened by the step thread, which owns all leases
        self._turns = 0
        self._forks = 0
        self._request: EngineSequence | None = None
        """The last one that was made."""
        self._is_open = False

    def __repr__(self) -> str:
        return f"<LocalSession {len(self._tokens)} ids, {self._turns} turns, seed {self._seed}>"

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
        grammar: Grammar | None = None,
        progress: Callable[[], None] | None = None,
    ) -> Completion:
        self._check_free()
        self._service.check_open()
        check_request(observed_ids, len(self._tokens), params, max_tokens, self._service.bounds)
        self._tokens.observe(observed_ids)
        del observed_ids  # not kept twice while the turn waits
        sequence = EngineSequence(
            tokens=self._tokens, params=params, max_tokens=max_tokens,
            seed=seeds.derive(self._seed, "turn", self._turns), group=self._hints.group, grammar=grammar,
        )  # fmt: skip
        self._turns += 1
        self._request = sequence
        await self._service.run(self, sequence, progress)
        if sequence.error:
            raise EngineFailure(sequence.error)
        return _completion(sequence)

    async def score(self, observed_ids: Sequence[int], scored_ids: Sequence[int], params: SamplingParams) -> Floats:
        self._check_free()
        self._service.check_open()
        if not len(scored_ids):
            raise RequestError("scored_ids is empty: there is nothing to score")
        check_request(observed_ids, len(self._tokens), params, len(scored_ids), self._service.bounds)
        check_ids("scored_ids", scored_ids, self._service.bounds)
        self._tokens.observe([*observed_ids, *scored_ids])
        sequence = EngineSequence(
            tokens=self._tokens, params=params, num_scored=len(scored_ids), group=self._hints.group
        )
        self._request = sequence
        await self._service.run(self, sequence)
        if sequence.error or sequence.finish_reason == "abort":
            raise EngineFailure(sequence.error or "the engine ended before it had scored")
        return sequence.scores

    def hint(self, hints: SessionHints) -> None:
        self._hints = hints
        self._post(self._give_hints)

    def pause(self, tool: str, arguments: str = "", deadline: float | None = None) -> None:
        self._check_free()
        self._post(lambda: self._core.pause(self.lease, tool, arguments, deadline))

    def progress(self, eta_seconds: float) -> None:
        self._post(lambda: self._core.progress(self.lease, eta_seconds))

    def resume(self) -> None:
        self._post(lambda: self._core.cache.unpause(self.lease))

    def fork(self) -> "LocalSession":
        child = LocalSession(self._service, seeds.derive(self._seed, "fork", self._forks), self._salt, self._hints)
        child._tokens = self._tokens.copy()
        child._forked_at = len(child._tokens)
        child._parent = self if self._is_open else None  # else it has no KV to share
        self._forks += 1
        return child

    def __enter__(self) -> Self:
        assert not self._is_open, "a session is entered once"
        self._is_open = True
        self._service.num_sessions += 1
        self._post(self._open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._post(self._close)
        self._is_open = False
        self._service.num_sessions -= 1

    @property
    def _core(self) -> EngineCore:
        return self._service.core

    def _check_free(self) -> None:
        """The calls of a session follow one another, inside its `with`: a breach is the caller's bug, and its alone."""
        assert self._is_open, "a session is asked inside its `with`"
        assert self._request is None or self._request.is_finished, "a session's request is still in flight"

    def _post(self, command: Command) -> None:
        """Have the step thread run `command`, which needs the lease. Without one, nothing happens."""
        if self._is_open:
            self._service.post(command)

    def _open(self) -> None:
        parent, self._parent = self._parent, None  # a long line of forks does not keep all of their ids
        self.lease = self._core.fork(parent.lease, self._forked_at) if parent else self._core.open(self._salt)
        self._give_hints()

    def _close(self) -> None:
        if self._request is not None:
            self._service.abort(self._request)
        self._core.close(self.lease)

    def _give_hints(self) -> None:
        self.lease.hints = self._hints


def _completion(sequence: EngineSequence) -> Completion:
    start, tokens = sequence.context_tokens, sequence.tokens
    assert sequence.finish_reason is not None
    started = sequence.ended if sequence.started is None else sequence.started
    first_token = sequence.ended if sequence.first_token is None else sequence.first_token
    return Completion(
        token_ids=Ids(tokens.token_ids[start:]), logprobs=Floats(tokens.logprobs[start:]),
        versions=Ids(tokens.versions[start:]), oldest_kv=sequence.oldest_kv,
        raw_logprobs=sequence.raw_logprobs, kept_logmass=sequence.kept_logmass, top_logprobs=sequence.top_logprobs,
        finish_reason=sequence.finish_reason, matched_stop=sequence.matched_stop, seed=sequence.seed,
        context_tokens=start, cached_tokens=max(sequence.cached_tokens, 0), kv=sequence.kv,
        queue_seconds=started - sequence.arrived, prefill_seconds=first_token - started,
        decode_seconds=sequence.ended - first_token,
        verifications=sequence.verifications, drafted_tokens=sequence.drafted, accepted_tokens=sequence.accepted,
    )  # fmt: skip
