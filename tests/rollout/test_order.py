"""Which tasks a run takes."""

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest

from agentrt import Environment, Task
from agentrt.core.errors import EnvironmentFailure, UsageError
from agentrt.rollout.order import WINDOW, chosen_tasks

pytestmark = pytest.mark.anyio


class Counted(Environment):
    splits = ("endless", "five", "none", "twins")

    def __init__(self) -> None:
        self.num_made, self.is_closed = 0, False

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        sizes = {"five": range(5), "none": range(0), "twins": (1, 1)}
        try:
            for index in sizes.get(split, count()):
                self.num_made += 1
                yield Task(f"{index}", ())
        finally:
            self.is_closed = True


async def ids(split: str, count: int, seed: int) -> list[str]:
    return [task.id for task in await chosen_tasks(Counted(), split, count, seed)]


async def test_the_order_is_fixed_by_the_seed() -> None:
    assert await ids("endless", 8, 1) == await ids("endless", 8, 1)
    assert await ids("endless", 8, 1) != await ids("endless", 8, 2)
    assert (await ids("endless", 8, 1))[:3] == await ids("endless", 3, 1)
    assert sorted(await ids("five", 5, 1)) == ["0", "1", "2", "3", "4"]


async def test_an_endless_split_is_read_to_the_window_and_closed() -> None:
    environment = Counted()
    await chosen_tasks(environment, "endless", 8, 1)
    assert (environment.num_made, environment.is_closed) == (WINDOW, True)


async def test_c23_a_split_that_runs_dry_gives_what_it_has() -> None:
    assert len(await ids("five", 9, 1)) == 5


async def test_splits_that_are_refused() -> None:
    with pytest.raises(UsageError, match="no split 'endles'; did you mean 'endless'"):
        await ids("endles", 1, 0)
    with pytest.raises(UsageError, match="has no tasks"):
        await ids("none", 1, 0)
    with pytest.raises(UsageError, match="two tasks with the id '1'"):
        await ids("twins", 1, 0)


def giving(tasks: Any) -> Environment:
    """An environment whose `tasks` is that, whatever it is."""
    return type("Wrong", (Environment,), {"tasks": tasks})()  # type: ignore[no-any-return]


async def test_tasks_that_are_none() -> None:
    async def coroutine(self: Environment, split: str) -> list[Task]:
        return []

    async def texts(self: Environment, split: str) -> AsyncIterator[str]:
        yield "task"

    async def raising(self: Environment, split: str) -> AsyncIterator[Task]:
        raise KeyError("no data")
        yield

    by_one = r"Wrong.tasks gives no tasks one by one; write `async def tasks\(self, split\)` with a `yield Task\(...\)`"
    for tasks in (coroutine, lambda self, split: []):
        with pytest.raises(UsageError, match=by_one):
            await chosen_tasks(giving(tasks), "train", 1, 0)
    with pytest.raises(UsageError, match="split 'train' has a str, not a Task"):
        await chosen_tasks(giving(texts), "train", 1, 0)
    with pytest.raises(UsageError, match="Environment must define `async def tasks"):
        await chosen_tasks(Environment(), "train", 1, 0)
    with pytest.raises(EnvironmentFailure, match=r"Wrong.tasks\('train'\) raised KeyError: 'no data'") as failed:
        await chosen_tasks(giving(raising), "train", 1, 0)
    assert isinstance(failed.value.__cause__, KeyError)
