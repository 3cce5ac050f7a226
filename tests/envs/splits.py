"""The tasks of a split, which may be endless."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

from agentrt import Environment, Task


async def take(environment: Environment, split: str, count: int) -> list[Task]:
    """The first `count` tasks, or as many as there are."""
    tasks = list[Task]()
    async with aclosing(cast("AsyncGenerator[Task, None]", environment.tasks(split))) as source:
        async for item in source:
            tasks.append(item)
            if len(tasks) == count:
                break
    return tasks
