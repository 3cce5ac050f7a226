"""`Recordings`: the sessions that clients are recorded in, by id, and what becomes of them.

A session begins with the first request that names it. It ends when it is told to, when nobody used it for a while, or
with the server; then its branches are one `EpisodeRecord`, as a run writes them.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import anyio
import msgspec

from agentrt.core import clock, seeds
from agentrt.core.records import EpisodeRecord, Score, StopReason
from agentrt.env.chat.renderer import Family
from agentrt.serve.conversation import Conversation, Sessions
from agentrt.serve.requests import BadRequest

IDLE_SECONDS = 3600.0
"""After which a session that nobody used is ended."""
LAST_REPLY_SECONDS = 1.0
_SESSION_ID = re.compile(r"[\w.:@-]{1,128}")


class Recording:
    """One session while it is open."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.reward: float | None = None
        self.num_active = 0
        """Requests under way."""
        self.used = clock.now()
        self.idle = anyio.Event()
        """Set while no request is under way."""

    def record(self) -> EpisodeRecord:
        """What was said so far."""
        conversation, reward = self.conversation, self.reward
        info = conversation.engine.info
        main = conversation.branches.get("main")
        return EpisodeRecord(
            task_id=conversation.name, member=0, attempt=0, seed=conversation.seed, status="ok",
            stop_reason=StopReason.COMPLETED, truncated=False, reward=reward,
            reward_reason=None if reward is not None else "not_scored",
            rewards={} if reward is None else {"client": Score(reward, 1.0)},
            branches=conversation.records(),
            messages=[msgspec.to_builtins(message) for message in main.messages] if main else [],
            logprobs_of=info.logprobs_of, quantized=info.quantized,
        )  # fmt: skip


class Recordings:
    """A context manager: leaving it ends every session. `write` is given each record."""

    def __init__(
        self,
        engine: Sessions,
        renderer: Family,
        write: Callable[[EpisodeRecord], None],
        *,
        seed: int,
        max_sessions: int,
    ) -> None:
        self._engine, self._renderer, self._write = engine, renderer, write
        self._seed, self._max_sessions = seed, max_sessions
        self._open: dict[str, Recording] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def using(self, session_id: str) -> Iterator[Conversation]:
        """The conversation of a session, a new one for an id that is not open. It does not end meanwhile."""
        recording = self._open.get(session_id) or self._begin(session_id)
        recording.num_active += 1
        recording.idle = anyio.Event()
        try:
            yield recording.conversation
        finally:
            recording.num_active -= 1
            recording.used = clock.now()
            if not recording.num_active:
                recording.idle.set()

    def get(self, session_id: str) -> Recording:
        """An open session."""
        if session_id not in self._open:
            raise BadRequest(f"no session {session_id!r} is open", status=404)
        return self._open[session_id]

    async def end(self, session_id: str) -> EpisodeRecord:
        """End a session: it is written, and its KV is freed. Refused if a request of it stays under way."""
        recording = self.get(session_id)
        if recording.num_active:
            with anyio.move_on_after(LAST_REPLY_SECONDS):  # a reply may have come before its request is done here
                await recording.idle.wait()
        if recording.num_active:
            raise BadRequest(f"session {session_id!r} has {recording.num_active} requests under way", status=409)
        return self._close(session_id)

    def _close(self, session_id: str) -> EpisodeRecord:
        recording = self.get(session_id)
        record = recording.record()
        self._write(record)
        del self._open[session_id]
        recording.conversation.__exit__(None, None, None)
        return record

    def end_idle(self) -> None:
        """End the sessions that nobody used for `IDLE_SECONDS`."""
        for session_id, recording in list(self._open.items()):
            if not recording.num_active and recording.used + IDLE_SECONDS < clock.now():
                self._close(session_id)

    def _begin(self, session_id: str) -> Recording:
        if not _SESSION_ID.fullmatch(session_id):
            raise BadRequest("a session id is 1 to 128 letters, digits and . _ : @ -")
        if len(self._open) >= self._max_sessions:
            raise BadRequest(f"{len(self._open)} sessions are open, the most that are; end one", status=429)
        seed = seeds.derive(self._seed, "session", session_id)
        conversation = Conversation(self._engine, self._renderer, seed=seed, name=session_id).__enter__()
        recording = self._open[session_id] = Recording(conversation)
        return recording

    def __enter__(self) -> "Recordings":
        return self

    def __exit__(self, *exc: object) -> None:
        with ExitStack() as stack:  # one that cannot be written keeps no other from it
            for session_id, recording in reversed(self._open.items()):
                stack.push(recording.conversation)
                stack.callback(self._close, session_id)
