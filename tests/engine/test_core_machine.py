"""The whole core under any order of calls: sessions, requests, aborts, forks, steps, over few pages.

After each call every page is accounted for, and at every end a request has sampled (or scored) what it would have alone.
"""

import gc
import tracemalloc
from collections.abc import Sequence as List
from functools import cache
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from numpy.typing import NDArray

from agentrt.core.spec import EngineSpec, KVPolicy, SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.engine.kv.evict import evict
from agentrt.engine.kv.group import Group
from agentrt.engine.kv.lease import Lease
from agentrt.engine.kv.radix import DEVICE, HOST, Node
from agentrt.engine.sequence import Sequence
from agentrt.engine.step import EngineCore
from agentrt.testing.copier import FaultyCopier
from agentrt.testing.toy import Logits, ToyRunner, hashed_logits

VOCAB, PAGE_SIZE = 6, 2
MOST_IDS = 24
"""In a session; its prompts are of two ids, so that sessions collide."""


@cache
def _row(prefix: tuple[int, ...]) -> NDArray[np.float32]:
    return np.asarray(hashed_logits(VOCAB)(prefix), dtype=np.float32)


def logits(prefix: List[int]) -> NDArray[np.float32]:
    return _row(tuple(prefix))


def make_core(
    groups: tuple[Group, ...] = (Group(32),), logits: Logits = logits, rows: int = 64, batch: int = 8, host_pages: int = 0,
    copier: FaultyCopier | None = None, policy: KVPolicy = "lru",
) -> EngineCore:  # fmt: skip
    spec = EngineSpec(page_size=PAGE_SIZE, kv_tokens=64, step_tokens=rows, max_batch=batch, kv_policy=policy)
    runner = ToyRunner(logits, page_size=PAGE_SIZE, groups=groups, host_pages=host_pages, copier=copier)
    return EngineCore(runner, spec, vocab_size=VOCAB, bytes_of=lambda _: b"")


def drain(core: EngineCore) -> int:
    steps = 0
    while not core.is_idle:
        core.step()
        steps += 1
        assert steps < 500, "the engine makes no progress"
    return steps


Outcome = tuple[list[int], list[float], list[float]]


def outcome(sequence: Sequence) -> Outcome:
    """Ids, logprobs, scores."""
    tokens, start = sequence.tokens, sequence.context_tokens
    return tokens.token_ids[start:].tolist(), tokens.logprobs[start:].tolist(), sequence.scores.tolist()


@cache
def alone(context: tuple[int, ...], max_tokens: int, num_scored: int, seed: int) -> Outcome:
    core, tokens = make_core(), Tokens()
    tokens.observe(context)
    sequence = Sequence(tokens=tokens, params=SamplingParams(), max_tokens=max_tokens, num_scored=num_scored, seed=seed)
    core.submit(sequence, core.open())
    drain(core)
    return outcome(sequence)


class Session:
    """A lease with its ids, and the request in flight."""

    def __init__(self, lease: Lease, tokens: Tokens) -> None:
        self.lease, self.tokens = lease, tokens
        self.sequence: Sequence | None = None
        self.expected: Outcome = ([], [], [])

    @property
    def is_busy(self) -> bool:
        return self.sequence is not None and not self.sequence.is_finished


class CoreMachine(RuleBasedStateMachine):
    """Pages for one and a half sessions, steps of 5 rows, 3 sequences at once."""

    sessions = Bundle("sessions")
    groups: tuple[Group, ...] = (Group(12),)
    host_pages = 0
    policy: KVPolicy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.delay = 0
        self.copier = FaultyCopier(delay=lambda: self.delay, checks=True)
        self.core = make_core(
            self.groups, rows=5, batch=3, host_pages=self.host_pages, copier=self.copier, policy=self.policy
        )
        self.open_sessions: list[Session] = []
        for _ in range(40):
            self.core._lengths.add(1)  # turns are short, says experience: too many are let in
            self.core._conversations._returns.add(6, 2)

    @initialize(target=sessions)
    def open_four(self) -> Any:
        return multiple(*(self.open("") for _ in range(4)))

    @rule(target=sessions, salt=st.sampled_from(["", "other"]))
    def open(self, salt: str) -> Session:
        self.open_sessions.append(Session(self.core.open(salt), Tokens()))
        return self.open_sessions[-1]

    @rule(
        session=sessions, length=st.integers(0, 9), bits=st.integers(0, 7), max_tokens=st.integers(1, 8),
        seed=st.integers(0, 1), group=st.sampled_from(["", "g"]), scores=st.booleans(), steps=st.integers(0, 3),
    )  # fmt: skip
    def submit(
        self, session: Session, length: int, bits: int, max_tokens: int, seed: int, group: str, scores: bool, steps: int
    ) -> None:
        prompt = [bits >> place & 1 for place in range(length)]
        num_scored = length // 2 if scores else 0
        max_tokens = 0 if num_scored else max_tokens
        if session.is_busy or not 0 < len(session.tokens) + len(prompt) <= MOST_IDS - max_tokens:
            return
        session.tokens.observe(prompt)
        session.expected = alone(tuple(session.tokens.token_ids), max_tokens, num_scored, seed)
        session.sequence = Sequence(
            tokens=session.tokens, params=SamplingParams(), max_tokens=max_tokens, num_scored=num_scored, seed=seed,
            group=group,
        )  # fmt: skip
        self.core.submit(session.sequence, session.lease)
        self.step(steps)

    @rule(length=st.integers(1, 7), bits=st.integers(0, 7), max_tokens=st.integers(1, 8), steps=st.integers(0, 9))
    def submit_everywhere(self, length: int, bits: int, max_tokens: int, steps: int) -> None:
        for index, session in enumerate(self.open_sessions):
            self.submit(session, length + index % 3, bits, max_tokens, index, "", index % 4 == 3, 0)
        self.step(steps)

    @rule(session=sessions)
    def abort(self, session: Session) -> None:
        if session.sequence is not None:
            self.core.abort(session.sequence)

    @rule(target=sessions, parent=sessions, share=st.floats(0, 1))
    def fork(self, parent: Session, share: float) -> Session:
        at, tokens = round(share * len(parent.tokens)), Tokens()
        tokens.observe(parent.tokens.token_ids[:at])
        self.open_sessions.append(Session(self.core.fork(parent.lease, at), tokens))
        return self.open_sessions[-1]

    @rule(session=consumes(sessions))
    def close(self, session: Session) -> None:
        self.abort(session)
        self.core.close(session.lease)
        self.open_sessions.remove(session)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            for sequence in self.core.step():
                assert sequence.is_finished
            self.core.check()

    @rule()
    def update(self) -> None:
        """Sessions opened from now on share nothing with those before."""
        self.core.version += 1

    @rule(delay=st.integers(0, 5), failing=st.sampled_from([0, 0, 0, 3, 2]))
    def link(self, delay: int, failing: int) -> None:
        """From now on copies end `delay` steps late, and those to every so manieth page of the device or the host fail."""
        self.delay = delay
        self.copier.fails = lambda direction, copy: failing > 0 and copy.target % failing == 0

    @rule(session=sessions, eta=st.none() | st.integers(0, 3))
    def pause(self, session: Session, eta: int | None) -> None:
        """A tool runs; that some will come back soon is all that the core knows of returns."""
        if not session.is_busy:
            self.core.pause(session.lease, "tool")
            if eta is not None:
                self.core.progress(session.lease, eta)

    @rule(session=sessions)
    def unpause(self, session: Session) -> None:
        self.core.cache.unpause(session.lease)

    @invariant()
    def outcomes_are_those_of_running_alone(self) -> None:
        for session in self.open_sessions:
            if session.sequence is None:
                continue
            assert not session.sequence.error
            found = outcome(session.sequence)
            if session.is_busy or session.sequence.finish_reason == "abort":
                ids, logprobs, scores = session.expected
                so_far = ids[: len(found[0])], logprobs[: len(found[1])], scores[: len(found[2])]
                assert found == so_far
            else:
                assert found == session.expected

    @invariant()
    def nothing_is_lost(self) -> None:
        self.core.check()

    def teardown(self) -> None:
        drain(self.core)
        self.outcomes_are_those_of_running_alone()
        for session in self.open_sessions:
            self.core.close(session.lease)
        self.core.check()
        drain(self.core)
        for tier in (HOST, DEVICE):
            evict(self.core.cache.tree, self.groups[0].num_pages + self.host_pages, tier)
        for pool in (*self.core.cache.pools, *self.core.cache.tier.pools):
            assert pool.num_free == pool.num_pages
            assert not any(pool.refs)
        assert not self.core.cache.tree._roots


class WindowMachine(CoreMachine):
    """Two windows; of the shorter, just the pages that three sequences can need in a step of 5 ids."""

    groups = (Group(14), Group(14, 5), Group(3 * (1 + 2) + 3, 2))


class HostMachine(CoreMachine):
    """A host tier for one more session and a half."""

    host_pages = 18


class HostWindowMachine(WindowMachine):
    """As `HostMachine`, with windows, and pins that never end."""

    host_pages = 24
    policy: KVPolicy = "ttl"


def test_memory_does_not_grow_over_2000_requests() -> None:
    """Sessions of two turns with salts of their own, one in five aborted; between the first 1,000 and the second."""
    core, sizes, objects = make_core((Group(24), Group(24, 4)), lambda prefix: [0.0] * VOCAB), [], []
    tracemalloc.start()
    for session in range(1001):
        if session % 500 == 0:
            core.runner.prefixes.clear()  # type: ignore[attr-defined]
            core.runner.rows.clear()  # type: ignore[attr-defined]
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
            objects.append(sum(type(one) in (Node, Lease, Sequence) for one in gc.get_objects()))
        lease, tokens = core.open(f"salt {session}"), Tokens()
        for turn in range(2):
            tokens.observe([session % VOCAB, turn, 1])
            sequence = Sequence(tokens=tokens, params=SamplingParams(), max_tokens=2)
            core.submit(sequence, lease)
            core.step()
            if session % 5 == 0:
                core.abort(sequence)
            drain(core)
            core.pause(lease, "tool")
        core.close(lease)
    tracemalloc.stop()
    core.check()
    assert core.statistics(0).pages_free + core.statistics(0).pages_cached == 24
    assert objects[2] <= objects[1]
    assert sizes[2] - sizes[1] < 16_000, "16 bytes a request"


CoreMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
WindowMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
HostMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
HostWindowMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestHostMachine = HostMachine.TestCase
TestHostWindowMachine = HostWindowMachine.TestCase
TestCoreMachine = CoreMachine.TestCase
TestWindowMachine = WindowMachine.TestCase
