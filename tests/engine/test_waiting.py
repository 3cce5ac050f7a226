"""The waiting queue is in order of rank, and is looked at when that may help."""

from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.engine.sequence import Sequence
from agentrt.engine.waiting import DEAF_SECONDS, WaitingQueue


def ranked(*rank: float) -> Sequence:
    sequence = Sequence(tokens=Tokens(), params=SamplingParams())
    sequence.rank = rank
    return sequence


def test_order_of_rank() -> None:
    queue = WaitingQueue(lambda: 0.0)
    first, second, third = ranked(1), ranked(2), ranked(3)
    for sequence in (second, third, first):
        queue.add(sequence)
    assert queue == [first, second, third]


def test_an_empty_queue_is_never_due() -> None:
    assert not WaitingQueue(lambda: 0.0).is_due(pages=100)


def test_one_that_lacked_pages_is_looked_at_when_more_come_free_or_later() -> None:
    now = [0.0]
    queue = WaitingQueue(lambda: now[0])
    queue.add(ranked(1))
    assert queue.is_due(pages=0)
    queue.looked(is_empty=False, is_lacking=True, pages=7)
    assert queue.is_refused
    assert (queue.is_due(pages=7), queue.is_due(pages=8)) == (False, True)
    now[0] += DEAF_SECONDS
    assert queue.is_due(pages=7)


def test_a_queue_of_which_nobody_may_come_in_is_left_alone_whatever_comes_free() -> None:
    queue = WaitingQueue(lambda: 0.0)
    queue.add(ranked(1))
    queue.looked(is_empty=True, is_lacking=True, pages=0)
    assert (queue.is_refused, queue.is_due(pages=100)) == (False, False)


def test_whoever_comes_or_goes_has_it_looked_at() -> None:
    queue = WaitingQueue(lambda: 0.0)
    queue.add(ranked(1))
    for change in (queue.look_again, lambda: queue.add(ranked(2))):
        queue.looked(is_empty=False, is_lacking=True, pages=7)
        assert not queue.is_due(pages=7)
        change()
        assert (queue.is_refused, queue.is_due(pages=7)) == (False, True)


def test_one_who_was_let_in_leaves_the_next_due() -> None:
    queue = WaitingQueue(lambda: 0.0)
    queue.add(ranked(1))
    queue.looked(is_empty=False, is_lacking=False, pages=7)
    assert (queue.is_refused, queue.is_due(pages=7)) == (False, True)
