"""Decoding sequences that are counted together: when each ends, needs a page, and what it has gained by then."""

from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.engine.forecast import Lengths
from agentrt.engine.kv.lease import Lease
from agentrt.engine.kv.radix import Namespace
from agentrt.engine.roster import ROWS, Roster
from agentrt.engine.sequence import Sequence


def decoding(context: int, sampled: int, pages: int) -> Sequence:
    """It knows all its ids, and the last of them is to be computed."""
    tokens = Tokens()
    tokens.observe([1] * context)
    sequence = Sequence(tokens=tokens, params=SamplingParams(), max_tokens=50)
    tokens.commit_all([2] * sampled, [-1.0] * sampled, 0)
    sequence.lease = Lease(Namespace(0), 1, 1, 0.0)
    sequence.lease.table[0].extend(range(pages))
    sequence.lease.computed = context + sampled - 1
    return sequence


def test_steps_up_to_the_next_end_or_page() -> None:
    """Pages of 8. The first has 10 of 16 ids computed and 3 steps to go; the second 7 of 8 and 20 steps."""
    roster, first, second = Roster(8), decoding(10, 1, pages=2), decoding(5, 3, pages=1)
    roster.join(first, 3)
    assert roster.num_alike == 3
    roster.join(second, 20)
    assert (roster.computed, roster.pages, roster.num_alike, roster.growing) == (10 + 7, 3, 1, [])
    roster.advance(1)
    assert [member.sequence for member in roster.growing] == [second]
    second.lease.table[0].append(2)
    roster.grow(roster.growing[0])
    assert (roster.pages, roster.num_alike) == (4, 2)
    assert [member.sequence for member in roster.ending(2)] == [first]
    assert roster.growths(Lengths(), 3).tolist() == [[12, 48, 0], [9, 46, 0]]
    assert (roster.computed, roster.unwritten) == (11 + 8, 2)
    roster.check()
    assert roster.leave(first) is not None
    assert roster.leave(first) is None
    roster.advance(2)
    assert (roster.computed, roster.unwritten, roster.num_alike) == (10, 3, 6)
    roster.check()


def test_as_many_as_there_are() -> None:
    roster, sequences = Roster(8), [decoding(9, 1, pages=2) for _ in range(ROWS + 2)]
    for sequence in sequences:
        roster.join(sequence, 5)
    for sequence in sequences[::2]:
        roster.leave(sequence)
    roster.check()
    assert list(roster.sequences) == sequences[1::2]
    assert len(roster.growths(Lengths(), 3)) == ROWS // 2 + 1
