"""What a sequence commits of the rows that a step computed for it: ids of its draft that stand, and one more."""

from collections.abc import Sequence as List
from typing import NamedTuple

from agentrt.core.spec import Verifier
from agentrt.engine.sampler import Drawn, Logits, drawn_instead, on_host
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import Draft, Floats
from agentrt.engine.speculate.verify import KeyedChance, block, coupled, rejection
from agentrt_kernels.sample.reference import probabilities
from agentrt_kernels.sample.rules import Rule


class Committed(NamedTuple):
    """What a verification came to."""

    drawn: List[Drawn]
    """The ids to commit, with their logprobs."""
    stood: List[int]
    """The places of the draft that all but the last of them are."""


def committed(
    sequence: Sequence, drawn: List[Drawn], logits_KV: Logits, rules: List[Rule], verifier: Verifier,
    vocab_size: int,
) -> Committed:  # fmt: skip
    """What to commit, from a row after the last id and one after each id of the draft.

    A row that cannot be sampled from (`Drawn.error`) is committed as such where it is reached, and nothing after it.
    """
    draft, ids = sequence.draft, [one.token_id for one in drawn]
    sound = 1 if verifier == "coupled" else next((row for row, one in enumerate(drawn) if one.error), len(drawn))
    if sound <= 1:  # and no law is asked for
        stood = _taken(draft, coupled(draft, ids.__getitem__))
        return Committed([drawn[0], *(drawn[place + 1] for place in stood)], stood)

    host_KV = on_host(logits_KV)

    def law(row: int) -> Floats:
        return probabilities(host_KV[row], rules[row], vocab_size)

    chance = KeyedChance(sequence.seed, "verify", len(sequence.tokens))
    ids = (rejection if verifier == "rejection" else block)(draft.cut(sound - 1), law, chance)
    stood = _taken(draft, ids)
    rows = [0, *(place + 1 for place in stood)]
    return Committed(
        [
            drawn_instead(drawn[row], token_id, host_KV[row], rules[row], vocab_size)
            for row, token_id in zip(rows, ids, strict=True)
        ],
        stood,
    )


def _taken(draft: Draft, ids: List[int]) -> List[int]:
    """The places of the draft that all but the last of these ids are."""
    return draft.walk(ids[:-1]) if draft.parents else range(len(ids) - 1)
