"""What a draft would have been worth is known without verifying it."""

import pytest

from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import Draft
from agentrt.engine.speculate.shadow import Shadow


def sequence_of(*ids: int) -> Sequence:
    tokens = Tokens()
    tokens.observe(list(ids))
    return Sequence(tokens=tokens, params=SamplingParams())


def sampled(sequence: Sequence, *ids: int) -> None:
    for token_id in ids:
        sequence.tokens.commit(token_id, -1.0, 0)


@pytest.mark.parametrize(
    ("ids", "accepted"), [((7, 8, 9), 3), ((7, 8, 9, 5), 3), ((7, 8, 5), 2), ((5,), 0), ((7, 5), 1)]
)
def test_what_was_sampled_says_what_of_a_draft_stands(ids: tuple[int, ...], accepted: int) -> None:
    shadow, sequence, draft = Shadow(), sequence_of(1, 2), Draft((7, 8, 9), kind="text")
    shadow.keep(sequence, draft)
    sampled(sequence, *ids)
    assert shadow.settle(sequence) == (draft, accepted)
    assert shadow.settle(sequence, is_over=True) is None


def test_it_is_not_known_before_enough_was_sampled() -> None:
    shadow, sequence = Shadow(), sequence_of(1)
    assert shadow.settle(sequence) is None
    shadow.keep(sequence, Draft((7, 8, 9), kind="text"))
    sampled(sequence, 7)
    shadow.keep(sequence, Draft((1, 1), kind="text"))  # the first one is still held against what comes
    assert shadow.settle(sequence) is None
    sampled(sequence, 8)
    assert shadow.settle(sequence, is_over=True) == (Draft((7, 8), kind="text"), 2)
