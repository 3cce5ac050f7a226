"""Rewards: what counts, what is null and why."""

import asyncio
import math
from collections.abc import Sequence
from decimal import Decimal
from types import ModuleType
from typing import Any, cast

import anyio
import numpy as np
import pytest

from agentrt import Rubric, group_reward, metric, reward
from agentrt.env.environment import Episode
from agentrt.env.rubric import Outcome, Scores, to_outcome

pytestmark = pytest.mark.anyio
EPISODE = cast(Episode, None)


class Tensor:
    """One of two numbers, as torch has it."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


class Graded:
    @reward(weight=2.0)
    async def first(self, episode: Any) -> float:
        return 0.5

    @metric
    async def size(self, episode: Any) -> int:
        return 3

    @reward
    async def second(self, episode: Any) -> bool:
        return True

    @group_reward(weight=0.5)
    async def third(self, episodes: Sequence[Any]) -> list[float]:
        return [float(len(episodes))] * len(episodes)

    async def helper(self) -> None: ...


async def test_the_reward_is_the_weighted_sum() -> None:
    scores = await Rubric(Graded()).score(EPISODE)
    assert list(scores.rewards) == ["first", "second"]
    assert (scores.reward, scores.reason, scores.metrics) == (2.0, None, {"size": 3.0})


async def test_a_property_is_not_asked_for() -> None:
    """It may load a data set."""

    class Lazy(Graded):
        @property
        def tasks(self) -> list[str]:
            raise AssertionError("it is not needed")

        @staticmethod
        @reward
        async def third(episode: Any) -> float:
            return 4.0

    scores = await Rubric(Lazy()).score(EPISODE)
    assert scores.reward == 6.0


async def test_group_rewards_are_added() -> None:
    rubric, scores = Rubric(Graded()), [Scores(), Scores()]
    await rubric.score_group([EPISODE, EPISODE], scores)
    assert [entry.reward for entry in scores] == [1.0, 1.0]
    assert scores[0].rewards["third"].weight == 0.5


async def test_one_null_component_makes_the_reward_null() -> None:
    class Broken(Graded):
        @reward(weight=1.0)
        async def second(self, episode: Any) -> bool:
            raise OSError("no grader")

        @metric
        async def size(self, episode: Any) -> int:
            raise OSError("no metric")

    scores = await Rubric(Broken()).score(EPISODE)
    assert (scores.reward, scores.reason) == (None, "reward_raised: OSError: no grader")
    assert (scores.rewards["first"].score, scores.rewards["second"].score, scores.metrics) == (0.5, None, {})


async def test_a_grader_that_exits_gives_no_reward() -> None:
    class Exits:
        @reward
        async def first(self, episode: Any) -> float:
            raise SystemExit("the model's code said exit()")

    scores = await Rubric(Exits()).score(EPISODE)
    assert (scores.reward, scores.reason) == (None, "reward_raised: SystemExit: the model's code said exit()")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_grader_that_awaits_what_was_cancelled_gives_no_reward() -> None:
    class Leaks:
        @reward
        async def first(self, episode: Any) -> float:
            ended = asyncio.ensure_future(asyncio.sleep(60))
            ended.cancel()
            await ended
            return 1.0

    scores = await Rubric(Leaks()).score(EPISODE)
    assert (scores.reward, scores.reason) == (None, "reward_raised: CancelledError: ")


async def test_the_reason_is_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    class Odd:
        @reward
        async def first(self, episode: Any) -> float:
            raise ValueError("half \ud800")

        @reward
        async def second(self, episode: Any) -> float:
            raise Mute

    scores = await Rubric(Odd()).score(EPISODE)
    assert scores.reasons == {
        "first": "reward_raised: ValueError: half ?",
        "second": "reward_raised: Mute: Mute, whose text cannot be had: RuntimeError",
    }


async def test_a_subclass_may_redefine_or_unmark() -> None:
    class Redefined(Graded):
        async def first(self, episode: Any) -> float:
            return 9.0

    scores = await Rubric(Redefined()).score(EPISODE)
    assert list(scores.rewards) == ["second"]


async def test_no_reward_function_is_no_reward() -> None:
    scores = await Rubric(object()).score(EPISODE)
    assert (scores.reward, scores.reason) == (None, "no_reward")


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (1, Outcome(1.0)),
        (True, Outcome(1.0)),
        (np.float32(0.5), Outcome(0.5)),
        (Decimal("0.25"), Outcome(0.25)),
        (None, Outcome(None, "no_reward")),
        (math.nan, Outcome(None, "non_finite_reward")),
        (-math.inf, Outcome(None, "non_finite_reward")),
        (np.finfo(np.float32).min, Outcome(float(np.finfo(np.float32).min))),
        (3.5e38, Outcome(None, "non_finite_reward")),
        (Tensor(), Outcome(None, "reward_is_no_number: Tensor")),
        (10**400, Outcome(None, "reward_is_no_number: int")),
        ("0.5", Outcome(None, "reward_is_no_number: str")),
        ([1.0], Outcome(None, "reward_is_no_number: list")),
        (1j, Outcome(None, "reward_is_no_number: complex")),
    ],
)
def test_c51_what_a_function_returns(value: Any, outcome: Outcome) -> None:
    assert to_outcome(value) == outcome


def test_a_sum_that_overflows_is_null() -> None:
    scores = Scores()
    scores.add("a", Outcome(1e38), 10.0)
    assert (scores.reward, scores.reason) == (None, "non_finite_reward")


@pytest.mark.parametrize("values", [[1.0], 3.0, None])
async def test_a_group_reward_of_the_wrong_shape(values: Any) -> None:
    class Wrong:
        @group_reward
        async def third(self, episodes: Sequence[Any]) -> Any:
            return values

    scores = [Scores(), Scores()]
    await Rubric(Wrong()).score_group([EPISODE, EPISODE], scores)
    assert [entry.reason for entry in scores] == ["group_reward_shape: expected 2 numbers"] * 2


async def test_cancellation_from_outside_passes() -> None:
    class Slow:
        @reward
        async def first(self, episode: Any) -> float:
            await anyio.sleep_forever()
            return 1.0

    with anyio.move_on_after(0.05) as scope:
        await Rubric(Slow()).score(EPISODE)
    assert scope.cancelled_caught


async def test_functions_of_a_module() -> None:
    module = ModuleType("m")

    @reward(weight=3.0)
    async def right(episode: Any) -> float:
        return 1.0

    module.right = right  # type: ignore[attr-defined]
    assert (await Rubric(module).score(EPISODE)).reward == 3.0


def test_marks_are_for_async_functions_and_finite_weights() -> None:
    with pytest.raises(TypeError, match="async def correct"):

        @reward(weight=1.0)  # type: ignore[type-var]
        def correct(self: Any, episode: Any) -> float:
            return 1.0

    with pytest.raises(ValueError, match="finite"):
        reward(weight=math.nan)
