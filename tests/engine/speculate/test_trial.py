"""A draft model is followed while what came of it says that it pays."""

from agentrt.engine.speculate.trial import FIRST_REST, LONGEST_REST, STEPS, Trial


def run(trial: Trial, steps: int, plain: float, spent: float) -> list[bool]:
    found = []
    for _ in range(steps):
        trial.note(plain, spent)
        found.append(trial.is_on)
    return found


def test_one_that_pays_stays_in_use() -> None:
    trial = Trial()
    assert trial.is_on
    assert all(run(trial, 10 * STEPS, 1.1, 1.0))


def test_one_that_does_not_rests_and_is_tried_again_later_each_time() -> None:
    trial = Trial()
    for rest in (FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST):
        assert run(trial, STEPS, 1.0, 1.5) == [True] * (STEPS - 1) + [False]
        assert run(trial, rest, 1.0, 1.0) == [False] * (rest - 1) + [True]
    for _ in range(20):
        trial.fail()
    assert trial._left == LONGEST_REST


def test_it_must_do_better_than_text_alone() -> None:
    trial = Trial()
    trial.fail()
    run(trial, FIRST_REST, 1.3, 1.0)
    assert run(trial, STEPS, 1.33, 1.0)[-1] is False
    run(trial, 2 * FIRST_REST, 1.3, 1.0)
    assert run(trial, STEPS, 1.35, 1.0)[-1] is True


def test_one_that_was_of_use_once_is_judged_by_what_it_does_now() -> None:
    trial = Trial()
    run(trial, 1000, 2.0, 1.0)
    assert run(trial, 3 * STEPS, 1.0, 1.2)[-1] is False
    trial.begin()  # trained again
    assert trial.is_on
