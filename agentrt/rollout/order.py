"""Which tasks a run takes, and in which order: fixed by the seed, whatever runs first."""

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from heapq import nsmallest

import anyio.lowlevel

from agentrt.core import seeds
from agentrt.core.errors import UsageError, users_code
from agentrt.core.spec import nearest
from agentrt.env.environment import Environment
from agentrt.env.task import Task

TASKS_A_TURN = 16
"""Of the event loop."""
WINDOW = 4096
"""A split may be endless, so the tasks are drawn from its first ones: this many, or as many as are asked for."""


def check_split(environment: Environment, split: str) -> None:
    """`UsageError` if the environment has no such split."""
    if split not in environment.splits:
        raise UsageError(f"{type(environment).__name__} has no split {split!r}; {nearest(split, environment.splits)}")


async def chosen_tasks(environment: Environment, split: str, count: int, seed: int) -> list[Task]:
    """`count` tasks of the window, in an order drawn by `seed`; fewer if the split is smaller.

    For one seed, a smaller `count` gives the beginning of what a larger one gives. Raises `UsageError` for an unknown
    or empty split, for what is no task and for two with one id, and `EnvironmentFailure` if `tasks` raises.
    """
    check_split(environment, split)
    ids: set[str] = set()
    chosen: list[tuple[int, str, Task]] = []
    async with aclosing(_first(environment, split, max(count, WINDOW))) as tasks:
        async for task in tasks:
            if not isinstance(task, Task):
                raise UsageError(f"split {split!r} has a {type(task).__name__}, not a Task(id, messages, data)")
            if task.id in ids:
                raise UsageError(f"split {split!r} has two tasks with the id {task.id!r}; ids are unique in a split")
            ids.add(task.id)
            chosen.append((seeds.derive(seed, "order", task.id), task.id, task))
            if len(chosen) >= 2 * count:
                chosen = nsmallest(count, chosen, key=_rank)
    if not chosen:
        raise UsageError(f"split {split!r} of {type(environment).__name__} has no tasks")
    return [task for _, _, task in nsmallest(count, chosen, key=_rank)]


def _rank(item: tuple[int, str, Task]) -> tuple[int, str]:
    return item[0], item[1]


async def _first(environment: Environment, split: str, count: int) -> AsyncGenerator[Task, None]:
    """The first `count` tasks of a split. The iterator is asked for no more, and is closed if it can be."""
    name = type(environment).__name__
    with users_code(f"{name}.tasks({split!r})"):
        tasks = environment.tasks(split)
        if not isinstance(tasks, AsyncIterator):
            if isinstance(tasks, Coroutine):
                tasks.close()  # or Python warns that nobody awaited it
            raise UsageError(
                f"{name}.tasks gives no tasks one by one; write `async def tasks(self, split)` with a `yield Task(...)`"
            )
        try:
            for index in range(count):
                if index % TASKS_A_TURN == 0:
                    await anyio.lowlevel.checkpoint()  # most iterators make tasks without waiting for anything
                try:
                    yield await anext(tasks)
                except StopAsyncIteration:
                    return
        finally:
            if isinstance(tasks, AsyncGenerator):
                await tasks.aclose()
