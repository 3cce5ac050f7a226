"""`Conversation`: what one client says and hears, as branches of exact ids over sessions of the engine.

A request without a session has a conversation of its own that ends with it; a recorded session has one that goes on.
The ids of a branch are only ever appended to. A turn whose client went away is in the record and in no context: the
next request goes on from where that turn began.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from anyio import get_cancelled_exc_class

from agentrt.core import seeds
from agentrt.core.errors import EngineFailure, RequestError
from agentrt.core.protocol import Completion, EngineInfo, EngineStatistics, Grammar, Session, SessionHints
from agentrt.core.records import BranchRecord, Fork, Rewrite, TurnRecord, branch_record, turn_record
from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.env.chat.message import Message
from agentrt.env.chat.offload import rendered
from agentrt.env.chat.renderer import Family
from agentrt.serve.messages import FunctionTool
from agentrt.serve.place import History, Mark, Place, place
from agentrt.serve.requests import BadRequest

CLIENT = "client"
"""What a session pauses for between two requests."""
CLIENT_ABORT = "client_abort"
"""`finish_reason` of a turn whose client went away."""


class Sessions(Protocol):
    """What serving needs of an `agentrt.core.protocol.Engine`."""

    @property
    def info(self) -> EngineInfo: ...

    def session(
        self, *, seed: int | None = None, salt: str = "", hints: SessionHints = SessionHints(), turn: int = 0
    ) -> Session: ...

    def statistics(self) -> EngineStatistics: ...


class Branch:
    """One linear sequence of ids, and the session of the engine that it owns from here to `close`."""

    def __init__(self, name: str, session: Session, fork: Fork | None = None, rewrite: Rewrite | None = None) -> None:
        self.name, self.session, self.fork, self.rewrite = name, session.__enter__(), fork, rewrite
        self.is_open = True
        self.tools: tuple[FunctionTool, ...] = ()
        self.messages: list[Message] = []
        self.marks: list[Mark] = []
        self.turns: list[TurnRecord] = []
        self.claim: object = None
        """Set while a turn of it is being placed or sampled: nobody else appends to it then."""

    @property
    def tokens(self) -> Tokens:
        """All its ids, those shared with its parent included."""
        return self.session.tokens

    def history(self) -> History:
        """What `place` decides by."""
        return History(self.name, self.tools, self.messages, self.marks, is_busy=self.claim is not None)

    def close(self) -> None:
        """Nothing is appended any more: its KV is given back. The ids stay."""
        if self.is_open:
            self.is_open = False
            self.session.__exit__(None, None, None)

    def record(self) -> BranchRecord:
        """As it is stored."""
        return branch_record(self.name, self.tokens, self.turns, self.fork, self.rewrite)


class OpenTurn:
    """A turn to be sampled once: the branch, the ids that come before it, and the messages that these say."""

    def __init__(self, branch: Branch, observed: Sequence[int], new: Sequence[Message] = ()) -> None:
        self.branch, self._observed, self._new = branch, observed, new
        self.context = len(branch.tokens) + len(observed)

    @property
    def prompt_ids(self) -> list[int]:
        """Every id before the turn, before it is sampled."""
        return [*self.branch.tokens.token_ids, *self._observed]

    async def sample(
        self, params: SamplingParams, max_tokens: int, progress: Callable[[], None], grammar: Grammar | None = None
    ) -> Completion:
        """Sample it. What was sampled of one that fails or is cancelled is in the record."""
        session = self.branch.session
        try:
            completion = await session.sample(
                self._observed, params, max_tokens=max_tokens, progress=progress, grammar=grammar
            )
        except BaseException as error:
            is_begun = len(self.branch.tokens) >= self.context  # else the engine refused it, and has appended nothing
            if is_begun and not isinstance(error, (RequestError, BadRequest)):
                self._note_partial(CLIENT_ABORT if isinstance(error, get_cancelled_exc_class()) else "abort")
            raise
        if completion.finish_reason == "abort":
            self._note_partial("abort")
            raise EngineFailure("the engine ended the request")
        return completion

    def keep(self, completion: Completion, message: Message | None) -> None:
        """Note a whole turn, and how its client sees it; without a `message` no messages go on from it."""
        branch, record = self.branch, turn_record(completion)
        branch.turns.append(record)
        branch.messages.extend(self._new)
        branch.marks.append(Mark(len(branch.messages), record.start, record.end, is_whole=message is not None))
        if message is not None:
            branch.messages.append(message)
        branch.claim = None  # the client may ask for the next turn before its reply is out of our hands
        branch.session.pause(CLIENT)

    def _note_partial(self, reason: str) -> None:
        branch, end = self.branch, len(self.branch.tokens)
        seed = seeds.derive(branch.session.seed, "turn", len(branch.turns))
        branch.turns.append(TurnRecord(start=self.context, end=end, seed=seed, finish_reason=reason))
        branch.messages.extend(self._new)
        branch.marks.append(Mark(len(branch.messages), self.context, end, is_whole=False))
        branch.close()


class Conversation:
    """A context manager: leaving it closes its branches."""

    def __init__(self, engine: Sessions, renderer: Family, *, seed: int, name: str = "", turn: int = 0) -> None:
        self.engine, self.renderer, self.seed, self.name, self._turn = engine, renderer, seed, name, turn
        self.branches: dict[str, Branch] = {}
        self._num_opened = 0

    @asynccontextmanager
    async def chat(
        self, wanted: tuple[Message, ...], tools: tuple[FunctionTool, ...], n: int
    ) -> AsyncIterator[list[OpenTurn]]:
        """`n` turns after `wanted`: one goes on where that is possible, the others share what comes before it."""
        found = place([branch.history() for branch in self.branches.values()], wanted, tools)
        if found.is_append and found.branch is not None:
            branch, fork = self.branches[found.branch], None
        else:
            fork = Fork(found.branch, found.at) if found.branch is not None else None
            branch = self._opened(fork, found.rewrite)
            branch.tools, branch.messages = tools, list(wanted[: len(wanted) - len(found.new)])
        with self._reserved([branch]):
            first = OpenTurn(branch, await self._observed(found, tools), found.new)
            prompt = first.prompt_ids if n > 1 else []
            others = [
                self._opened(fork or (Fork(branch.name, len(branch.tokens)) if found.is_append else None))
                for _ in range(n - 1)
            ]
            for other in others:
                other.tools, other.messages = tools, list(branch.messages)
            with self._reserved(others):
                yield [first, *(OpenTurn(other, prompt, found.new) for other in others)]

    @asynccontextmanager
    async def ids(self, prompt: Sequence[int], n: int) -> AsyncIterator[list[OpenTurn]]:
        """`n` turns after `prompt`: one goes on the branch that `prompt` begins with, if an open one is there."""
        prompt = list(prompt)
        goes_on = [
            branch
            for branch in self.branches.values()
            if branch.claim is None
            and branch.is_open
            and prompt[: len(branch.tokens)] == branch.tokens.token_ids.tolist()
        ]
        first = max(goes_on, key=lambda branch: len(branch.tokens), default=None) or self._opened()
        others = [self._opened() for _ in range(n - 1)]
        with self._reserved([first, *others]):
            yield [OpenTurn(first, prompt[len(first.tokens) :]), *(OpenTurn(other, prompt) for other in others)]

    def records(self) -> list[BranchRecord]:
        """Every branch that holds ids."""
        return [branch.record() for branch in self.branches.values() if len(branch.tokens)]

    async def _observed(self, found: Place, tools: tuple[FunctionTool, ...]) -> list[int]:
        """What the turn at `found` appends to its branch."""
        if found.branch is None:
            return list(await rendered(lambda: self.renderer.prompt(found.new, tools), found.new))
        tokens = self.branches[found.branch].tokens
        shared = [] if found.is_append else tokens.token_ids[: found.at].tolist()
        if not found.new:
            return shared
        last = tokens.token_ids[found.at - 1]
        end_id = last if tokens.mask[found.at - 1] == 1 and last in self.renderer.stop_token_ids else None
        joining = await rendered(
            lambda: self.renderer.join(found.new, ended=end_id is not None, end_id=end_id), found.new
        )
        return [*shared, *joining]

    @contextmanager
    def _reserved(self, branches: Sequence[Branch]) -> Iterator[None]:
        """Nobody else appends to these meanwhile. One that got no ids goes, for nothing was said on it."""
        claim = object()
        for branch in branches:
            branch.claim = claim
        try:
            yield
        finally:
            for branch in branches:
                if branch.claim is claim:
                    branch.claim = None
                    if not len(branch.tokens):
                        self.branches.pop(branch.name).close()

    def _opened(self, fork: Fork | None = None, rewrite: Rewrite | None = None) -> Branch:
        """A new branch. The first one samples with the conversation's own seed."""
        count, self._num_opened = self._num_opened, self._num_opened + 1
        name = f"branch-{count}" if count else "main"
        seed = seeds.derive(self.seed, "branch", count) if count else self.seed
        session = self.engine.session(seed=seed, hints=SessionHints(group=f"{self.name or self.seed}"), turn=self._turn)
        branch = Branch(name, session, fork, rewrite)
        self.branches[name] = branch
        return branch

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, *exc: object) -> None:
        for branch in self.branches.values():
            branch.close()
