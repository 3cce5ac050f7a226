"""Recorded conversations once more, turn by turn with their own seeds: what the same text takes with other settings.

Tools cost nothing here: what a tool said follows at once. Turns that wait for one another are those of one conversation.
"""

from collections.abc import Sequence as List
from typing import NamedTuple

from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import IntArray, Tokens
from agentrt.engine.kv.lease import Lease
from agentrt.engine.sequence import Sequence
from agentrt.engine.step import EngineCore


class Turn(NamedTuple):
    """What was sampled after what was observed."""

    observed_ids: IntArray
    sampled_ids: IntArray
    seed: int
    max_tokens: int


class Figures(NamedTuple):
    """Of one turn that was sampled again; seconds from its first id to its last, and from its request to its last."""

    generation_seconds: float
    total_seconds: float
    drafted: int
    accepted: int
    verifications: int
    is_same: bool
    """It said the same ids."""


class _Replayed:
    """A conversation, and how far it is."""

    def __init__(self, core: EngineCore, turns: List[Turn]) -> None:
        self.turns, self.tokens, self.figures = turns, Tokens(), list[Figures]()
        self.lease: Lease = core.open()

    def submit(self, core: EngineCore, params: SamplingParams) -> Sequence:
        turn = self.turns[len(self.figures)]
        self.tokens.observe(turn.observed_ids)
        sequence = Sequence(tokens=self.tokens, params=params, max_tokens=turn.max_tokens, seed=turn.seed)
        core.submit(sequence, self.lease)
        return sequence

    def ended(self, sequence: Sequence) -> bool:
        """Note a turn; whether another follows. What says something else than it did goes no further."""
        turn = self.turns[len(self.figures)]
        is_same = sequence.tokens.token_ids[sequence.context_tokens :] == turn.sampled_ids
        first = sequence.ended if sequence.first_token is None else sequence.first_token
        self.figures.append(
            Figures(
                sequence.ended - first, sequence.ended - sequence.arrived, sequence.drafted, sequence.accepted,
                sequence.verifications, is_same,
            )
        )  # fmt: skip
        return is_same and len(self.figures) < len(self.turns)


def replay(
    core: EngineCore, conversations: List[List[Turn]], params: SamplingParams, most_live: int
) -> list[list[Figures]]:
    """Sample every turn again, `most_live` conversations at a time in the order given; the figures of each turn."""
    replayed = [_Replayed(core, turns) for turns in conversations]
    waiting, running = list(reversed(replayed)), dict[Sequence, _Replayed]()
    while waiting or running:
        while waiting and len(running) < most_live:
            one = waiting.pop()
            running[one.submit(core, params)] = one
        for sequence in core.step():
            one = running.pop(sequence)
            if one.ended(sequence):
                running[one.submit(core, params)] = one
            else:
                core.close(one.lease)
    return [one.figures for one in replayed]
