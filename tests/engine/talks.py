"""Conversations with a toy engine whose logits are computed from the ids that it finds in the pages, without a service."""

from collections.abc import Callable

from agentrt.core.spec import EngineSpec, KVPolicy, SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.engine.kv.lease import State
from agentrt.engine.sequence import Sequence
from agentrt.engine.step import EngineCore
from agentrt.testing.copier import FaultyCopier
from agentrt.testing.toy import ToyRunner, hashed_logits

VOCAB = 8
LOGITS = hashed_logits(VOCAB)


def make_core(
    pages: int, host_pages: int = 0, *, page_size: int = 2, copier: FaultyCopier | None = None, policy: KVPolicy = "lru",
    ttl: float = 2.0, rows: int = 64, clock: Callable[[], float] = lambda: 0.0,
) -> EngineCore:  # fmt: skip
    spec = EngineSpec(
        page_size=page_size,
        kv_tokens=pages * page_size,
        step_tokens=rows,
        max_batch=8,
        kv_policy=policy,
        kv_ttl_seconds=ttl,
    )
    runner = ToyRunner(LOGITS, num_pages=pages, page_size=page_size, host_pages=host_pages, copier=copier)
    return EngineCore(runner, spec, vocab_size=VOCAB, bytes_of=lambda _: b"", clock=clock)


class Talk:
    """A session without a service."""

    def __init__(self, core: EngineCore, group: str = "") -> None:
        self.core, self.tokens, self.turns, self.group = core, Tokens(), 0, group
        self.lease = core.open()
        self.sequence: Sequence

    def ask(self, ids: list[int], max_tokens: int = 3) -> Sequence:
        """Queue a turn."""
        self.tokens.observe(ids)
        self.turns += 1
        self.sequence = Sequence(
            tokens=self.tokens, params=SamplingParams(), max_tokens=max_tokens, seed=self.turns, group=self.group
        )
        self.core.submit(self.sequence, self.lease)
        return self.sequence

    def turn(self, ids: list[int], max_tokens: int = 3) -> None:
        """A turn to its end, and the pause after it."""
        self.ask(ids, max_tokens)
        drain(self.core)
        self.core.pause(self.lease, "tool")
        self.core.check()

    @property
    def said(self) -> tuple[list[int], list[float]]:
        """Ids and logprobs, all of them."""
        return self.tokens.token_ids.tolist(), self.tokens.logprobs.tolist()


def drain(core: EngineCore, most: int = 400) -> int:
    steps = 0
    while core.waiting or core.running:
        core.step()
        core.check()
        steps += 1
        assert steps < most, "the engine makes no progress"
    return steps


def settle(core: EngineCore) -> None:
    """Until no copy is under way either."""
    while not core.is_idle:
        core.step()
        core.check()


def park(talk: Talk) -> None:
    """Park a conversation; no step in which it would come back at once."""
    cache = talk.core.cache
    cache.park(talk.lease)
    while talk.lease.state is State.PARKING:
        assert cache.wait_for_parking()
        cache.poll()
    assert talk.lease.state is State.PARKED


def two_settled(core: EngineCore) -> tuple[Talk, Talk]:
    """Two conversations that had a turn each, eleven ids with KV, and no copy under way."""
    a, b = Talk(core), Talk(core)
    a.turn(prompt(0))
    b.turn(prompt(3))
    settle(core)
    return a, b


def states(*talks: Talk) -> list[State]:
    return [talk.lease.state for talk in talks]


def unlimited(turns: list[list[int]], max_tokens: int = 3) -> tuple[list[int], list[float]]:
    """What a conversation of these observations says with room for everything."""
    talk = Talk(make_core(256))
    for ids in turns:
        talk.turn(ids, max_tokens)
    return talk.said


def prompt(start: int, length: int = 8) -> list[int]:
    return [(start + index) % VOCAB for index in range(length)]
