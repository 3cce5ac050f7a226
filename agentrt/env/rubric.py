"""Rewards: which functions score an episode, and what they gave.

Functions are marked where they are written (`@reward(weight=1.0)`, `@metric`, `@group_reward`) and collected from the
environment by `Rubric`. A reward that could not be had is null with a reason, never 0: a failed grader must not move a
group's mean. If one component is null, so is the episode's reward.
"""

import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from inspect import getattr_static, iscoroutinefunction
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, overload

import anyio

from agentrt.core import clock
from agentrt.core.errors import is_failure
from agentrt.core.records import Score, text_of
from agentrt.env.environment import Episode

Function = TypeVar("Function", bound=Callable[..., Awaitable[Any]])

_MARK = "__agentrt_scores__"

NO_REWARD = "no_reward"
"""Nothing gave a reward: there is no reward function, or it returned None."""
NON_FINITE = "non_finite_reward"
NOT_A_NUMBER = "reward_is_no_number"
TIMED_OUT = "score_timeout"

LARGEST = 3.4028234663852886e38
"""Of a float32, in which trainers have rewards: a larger one is none that is finite, and sums of many stay finite."""


class Reward(NamedTuple):
    """Mark of a reward function: `async def f(episode) -> float`."""

    weight: float


class Metric(NamedTuple):
    """Mark of a metric: as a reward, but recorded only."""


class GroupReward(NamedTuple):
    """Mark of a reward that needs all members: `async def f(episodes) -> list[float]`."""

    weight: float


class Outcome(NamedTuple):
    """What one function gave: a finite number, or the reason there is none."""

    score: float | None
    reason: str | None = None


class Scores:
    """An episode's components so far, and the reward they make."""

    __slots__ = ("metrics", "reasons", "rewards")

    def __init__(self) -> None:
        self.rewards: dict[str, Score] = {}
        self.reasons: dict[str, str] = {}
        """Why a component is null."""
        self.metrics: dict[str, float] = {}

    def add(self, name: str, outcome: Outcome, weight: float) -> None:
        """Add one component."""
        self.rewards[name] = Score(outcome.score, weight)
        if outcome.reason is not None:
            self.reasons[name] = outcome.reason

    @property
    def reward(self) -> float | None:
        """The weighted sum; null if a component is, if it overflows, or if there is none."""
        return self._sum() if self.reason is None else None

    @property
    def reason(self) -> str | None:
        """Why the reward is null."""
        if not self.rewards:
            return NO_REWARD
        missing = next(iter(self.reasons.values()), None)
        return missing or (None if abs(self._sum()) <= LARGEST else NON_FINITE)

    def _sum(self) -> float:
        return sum(part.weight * part.score for part in self.rewards.values() if part.score is not None)


@overload
def reward(function: Function, /) -> Function: ...
@overload
def reward(*, weight: float = 1.0) -> Callable[[Function], Function]: ...
def reward(function: Any = None, /, *, weight: float = 1.0) -> Any:
    """Mark an async function of an episode as a component of its reward."""
    return _marked(function, Reward(_finite(weight)))


def metric(function: Function, /) -> Function:
    """Mark an async function of an episode as a number to record."""
    marked: Function = _marked(function, Metric())
    return marked


@overload
def group_reward(function: Function, /) -> Function: ...
@overload
def group_reward(*, weight: float = 1.0) -> Callable[[Function], Function]: ...
def group_reward(function: Any = None, /, *, weight: float = 1.0) -> Any:
    """Mark an async function of a group's episodes that gives each one a component of its reward.

    It is given those that ended without error, in member order.
    """
    return _marked(function, GroupReward(_finite(weight)))


class Rubric:
    """The marked functions of an environment (or of any object or module), in the order they were written."""

    def __init__(self, owner: object) -> None:
        self.rewards: dict[str, tuple[Callable[..., Awaitable[Any]], float]] = {}
        self.metrics: dict[str, Callable[..., Awaitable[Any]]] = {}
        self.group_rewards: dict[str, tuple[Callable[..., Awaitable[Any]], float]] = {}
        for name in _names(owner):
            written = getattr_static(owner, name)  # not called for: a property may load a data set
            match getattr(getattr(written, "__func__", written), _MARK, None):
                case Reward(weight):
                    self.rewards[name] = getattr(owner, name), weight
                case GroupReward(weight):
                    self.group_rewards[name] = getattr(owner, name), weight
                case Metric():
                    self.metrics[name] = getattr(owner, name)

    async def score(self, episode: Episode, seconds: float = math.inf) -> Scores:
        """Run rewards, then metrics. One that raises, or is not done after `seconds`, is null (a metric: left out)."""
        scores, deadline = Scores(), clock.now() + seconds
        for name, (function, weight) in self.rewards.items():
            scores.add(name, await _number(function, episode, deadline), weight)
        for name, function in self.metrics.items():
            outcome = await _number(function, episode, deadline)
            if outcome.score is not None:
                scores.metrics[name] = outcome.score
        return scores

    async def score_group(
        self, episodes: Sequence[Episode], scores: Sequence[Scores], seconds: float = math.inf
    ) -> None:
        """Run group rewards over `episodes` and add each one's components to its entry of `scores`."""
        deadline = clock.now() + seconds
        for name, (function, weight) in self.group_rewards.items():
            outcomes = await _numbers(function, episodes, deadline)
            for entry, outcome in zip(scores, outcomes, strict=True):
                entry.add(name, outcome, weight)


def to_outcome(value: Any) -> Outcome:
    """What a function returned, as a finite number or the reason it is none."""
    if value is None:
        return Outcome(None, NO_REWARD)
    try:
        number = float(value) if not isinstance(value, str | bytes) else None
    except Exception:  # the value's own code: a tensor of two numbers raises a RuntimeError
        number = None
    if number is None:
        return Outcome(None, f"{NOT_A_NUMBER}: {type(value).__name__}")
    return Outcome(number) if abs(number) <= LARGEST else Outcome(None, NON_FINITE)


async def _number(function: Callable[..., Awaitable[Any]], episode: Episode, deadline: float) -> Outcome:
    value, reason = await _guarded(function, episode, deadline)
    return Outcome(None, reason) if reason else to_outcome(value)


async def _numbers(
    function: Callable[..., Awaitable[Any]], episodes: Sequence[Episode], deadline: float
) -> list[Outcome]:
    values, reason = await _guarded(function, episodes, deadline)
    if not reason and (not isinstance(values, Sequence) or len(values) != len(episodes)):
        reason = f"group_reward_shape: expected {len(episodes)} numbers"
    return [Outcome(None, reason)] * len(episodes) if reason else [to_outcome(value) for value in values]


async def _guarded(function: Callable[..., Awaitable[Any]], given: Any, deadline: float) -> tuple[Any, str | None]:
    """The function's value, or the reason there is none. Cancellation from outside passes."""
    with anyio.CancelScope(deadline=deadline):
        try:
            return await function(given), None
        except BaseException as error:  # a grader's failure is a value, and this is where it becomes one
            if not is_failure(error):
                raise
            import structlog  # here, because it takes 0.2 s and `import agentrt` must not

            stack = text_of("".join(traceback.format_exception(error)))
            structlog.get_logger(__name__).info("reward_raised", function=function.__qualname__, exception=stack)
            return None, f"reward_raised: {type(error).__name__}: {text_of(error)}"
    return None, TIMED_OUT


def _marked(function: Any, mark: Reward | Metric | GroupReward) -> Any:
    def apply(target: Any) -> Any:
        if not iscoroutinefunction(target):
            name = getattr(target, "__name__", repr(target))
            raise TypeError(f"{name}: a reward or metric is an async function: `async def {name}(self, episode)`")
        setattr(target, _MARK, mark)
        return target

    return apply if function is None else apply(function)


def _finite(weight: float) -> float:
    if not math.isfinite(weight):
        raise ValueError(f"weight must be a finite number, not {weight}")
    return weight


def _names(owner: object) -> list[str]:
    """Names defined by `owner`, base classes first; a name defined again keeps its first place."""
    if isinstance(owner, ModuleType):
        return list(vars(owner))
    classes = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    return list(dict.fromkeys(name for cls in reversed(classes) for name in vars(cls)))
