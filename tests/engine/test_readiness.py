"""Whose turn comes first, by what the trainer waits for."""

from math import inf

from agentrt.core.protocol import SessionHints
from agentrt.engine.readiness import Readiness


def test_arrival() -> None:
    assert Readiness("arrival").rank(SessionHints(members_left=1, oldest_version=3), 500, 2.5) == (2.5,)


def test_synchronous_serves_first_who_has_most_left() -> None:
    """Members of a group that have ended tell of the others; before, all that have ended do."""
    order = Readiness("synchronous")
    assert order.rank(SessionHints(group="a"), 500, 1.0) == (0.0, 1.0), "nothing has ended"
    order.ended("a", 1000)
    order.ended("a", 3000)
    assert order.rank(SessionHints(group="a"), 500, 1.0) == (-1500.0, 1.0)
    order.ended("b", 8000)
    assert order.rank(SessionHints(group="b"), 500, 1.0) == (-7500.0, 1.0)
    assert order.rank(SessionHints(group="c"), 500, 1.0) == (-3500.0, 1.0), "the mean of all"
    assert order.left("a", 5000) == 0.0, "it is longer than expected"


def test_asynchronous_serves_first_what_is_soon_too_old_then_groups_that_are_nearly_whole() -> None:
    order = Readiness("asynchronous")
    hints = [
        SessionHints(members_left=1), SessionHints(members_left=3, oldest_version=7), SessionHints(oldest_version=6),
        SessionHints(members_left=1, oldest_version=7),
    ]  # fmt: skip
    ranks = [order.rank(one, 10, float(at)) for at, one in enumerate(hints)]
    assert sorted(range(4), key=ranks.__getitem__) == [2, 3, 1, 0]
    assert ranks[2] == (6, inf, 2.0)
