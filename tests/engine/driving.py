"""An engine's core driven by hand: requests are queued, and steps run until nothing is in flight."""

from collections.abc import Callable
from typing import Any

from agentrt.core.tokens import Tokens
from agentrt.engine.kv.lease import Lease
from agentrt.engine.sequence import Sequence
from agentrt.engine.step import EngineCore

MOST_STEPS = 10_000


def submit(
    core: EngineCore, ids: list[int], *, lease: Lease | None = None, tokens: Tokens | None = None, **request: Any
) -> Sequence:
    """Queue a turn of a session: of the one with this lease and these tokens, or of a new one. The rest is `Sequence`'s."""
    tokens = Tokens() if tokens is None else tokens
    tokens.observe(ids)
    sequence = Sequence(tokens=tokens, **request)
    core.submit(sequence, lease or core.open())
    return sequence


def drain(core: EngineCore, before_step: Callable[[int], None] = lambda step: None) -> None:
    """Step until nothing is in flight; the core is checked after each step."""
    step = 0
    while not core.is_idle:
        before_step(step)
        core.step()
        core.check()
        step += 1
        assert step < MOST_STEPS, "the engine makes no progress"


def output(sequence: Sequence) -> tuple[list[int], list[float]]:
    """The ids and logprobs of a turn."""
    tokens, start = sequence.tokens, sequence.context_tokens
    return tokens.token_ids[start:].tolist(), tokens.logprobs[start:].tolist()
