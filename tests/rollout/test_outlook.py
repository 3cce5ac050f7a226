"""When a turn's calls will be done, from what they say."""

from hypothesis import given
from hypothesis import strategies as st

from agentrt.rollout.outlook import MIN_GAP_SECONDS, Outlook
from agentrt.sandbox.reply import Progress


def test_the_last_call_counts_and_one_that_has_ended_does_not() -> None:
    outlook = Outlook(started=0.0, seconds=20.0)
    assert outlook.hear(0, Progress(0.5, 8.0), 1.0) == 8.0
    assert outlook.hear(1, Progress(None, 2.0), 2.0) == 7.0
    outlook.forget(0)
    assert outlook.hear(1, Progress(None, 1.0), 3.0) == 1.0


def test_what_is_left_goes_on_as_fast_as_what_is_done() -> None:
    outlook = Outlook(started=10.0, seconds=100.0)
    assert outlook.hear(0, Progress(0.25), 15.0) == 15.0
    assert outlook.hear(0, Progress(1.0), 16.0) == 0.0
    assert outlook.hear(0, Progress(0.0), 17.0) is None
    assert outlook.hear(0, Progress(), 17.0) is None


def test_nothing_is_later_than_the_limit() -> None:
    outlook = Outlook(started=0.0, seconds=20.0)
    assert outlook.hear(0, Progress(1e-9), 5.0) == 15.0
    assert outlook.hear(0, Progress(None, 9e6), 6.0) == 14.0


@given(st.lists(st.tuples(st.floats(0, 0.02), st.integers(0, 3), st.floats(0, 1), st.floats(0, 1e7))))
def test_a_flood_is_a_few_words(said: list[tuple[float, int, float, float]]) -> None:
    outlook, now, passed = Outlook(started=0.0, seconds=5.0), 0.0, 0
    for gap, call, progress, eta in said:
        now += gap
        told = outlook.hear(call, Progress(progress, eta), now)
        passed += told is not None
        assert told is None or 0 <= told <= 5.0
    assert passed <= 1 + now / MIN_GAP_SECONDS
