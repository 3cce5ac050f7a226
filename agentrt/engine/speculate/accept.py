"""What a sequence commits of the rows that a step computed for it: the ids of its draft that stand, and one more."""

from collections.abc import Sequence as List

from agentrt.core.spec import Verifier
from agentrt.engine.sampler import Drawn, Logits, drawn_instead, on_host
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import Floats
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
    draft = sequence.draft
    sound = next((depth for depth, one in enumerate(drawn) if one.error), len(drawn))
    if verifier == "coupled" or sound <= 1:
        return drawn[: len(coupled(draft.ids, lambda depth: drawn[depth].token_id))]

    host_KV = on_host(logits_KV)

    def law(depth: int) -> Floats:
        return probabilities(host_KV[depth], rules[depth], vocab_size)

    chance = KeyedChance(sequence.seed, "verify", len(sequence.tokens))
    ids = (rejection if verifier == "rejection" else block)(draft.cut(sound - 1), law, chance)
    return [
        drawn_instead(drawn[depth], token_id, host_KV[depth], rules[depth], vocab_size)
        for depth, token_id in enumerate(ids)
    ]
