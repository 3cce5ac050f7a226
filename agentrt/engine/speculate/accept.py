"""What a sequence commits of the rows that a step computed for it: ids of its draft that stand, and one more."""

from collections.abc import Sequence as List

from agentrt.core.spec import Verifier
from agentrt.engine.sampler import Drawn, Logits, drawn_instead, on_host
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import Draft, Floats
from agentrt.engine.speculate.verify import KeyedChance, block, coupled, rejection
from agentrt_kernels.sample.reference import probabilities
from agentrt_kernels.sample.rules import Rule


def committed(
    sequence: Sequence, drawn: List[Drawn], logits_KV: Logits, rules: List[Rule], verifier: Verifier,
    vocab_size: int,
) -> List[Drawn]:  # fmt: skip
    """The ids to commit, with their logprobs, from a row after the last id and one after each id of the draft.

    A row that cannot be sampled from (`Drawn.error`) is committed as such where it is reached, and nothing after it.
    """
    draft, ids = sequence.draft, [one.token_id for one in drawn]
    sound = 1 if verifier == "coupled" else next((row for row, one in enumerate(drawn) if one.error), len(drawn))
    if sound <= 1:  # and no law is asked for
        return [drawn[row] for row in _rows(draft, coupled(draft, ids.__getitem__))]

    host_KV = on_host(logits_KV)

    def law(row: int) -> Floats:
        return probabilities(host_KV[row], rules[row], vocab_size)

    chance = KeyedChance(sequence.seed, "verify", len(sequence.tokens))
    ids = (rejection if verifier == "rejection" else block)(draft.cut(sound - 1), law, chance)
    return [
        drawn_instead(drawn[row], token_id, host_KV[row], rules[row], vocab_size)
        for row, token_id in zip(_rows(draft, ids), ids, strict=True)
    ]


def _rows(draft: Draft, ids: List[int]) -> List[int]:
    """The rows that committed ids come from: all but the last are the draft's."""
    if not draft.parents:
        return range(len(ids))
    return [0, *(place + 1 for place in draft.walk(ids[:-1]))]
