"""How many calls run at one time, of all tools and of each; in virtual time."""

from typing import Any

import anyio
import pytest

from agentrt.core import clock
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.terms import Terms, ToolLimits

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(virtual_time: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    return virtual_time


async def run(permits: Permits, *calls: tuple[str, Terms]) -> list[tuple[float, str]]:
    """Calls of ten seconds each; when each began, or that it did not, in order of the call."""
    found = [(-1.0, "")] * len(calls)

    async def one(index: int, name: str, terms: Terms) -> None:
        try:
            with await permits.permit([name], terms) as permit:
                found[index] = clock.now() - started, name
                assert abs(permit.waited - (clock.now() - started)) < 1e-6
                await anyio.sleep(10)
        except TimeoutError:
            found[index] = clock.now() - started, "none"

    started = clock.now()
    async with anyio.create_task_group() as group:
        for index, (name, terms) in enumerate(calls):
            group.start_soon(one, index, name, terms)
            await anyio.lowlevel.checkpoint()
    return [(round(when, 3), name) for when, name in found]


async def test_calls_take_turns() -> None:
    assert sorted(await run(Permits(2), *[("a", Terms())] * 4)) == [(0, "a"), (0, "a"), (10, "a"), (10, "a")]


async def test_a_tools_own_cap_keeps_no_place_from_others() -> None:
    capped = Terms(max_concurrency=1)
    assert sorted(await run(Permits(3), *[("a", capped)] * 3, *[("b", Terms())] * 2)) == [
        (0, "a"), (0, "b"), (0, "b"), (10, "a"), (20, "a"),
    ]  # fmt: skip


async def test_a_wait_has_an_end_and_then_the_place_is_free() -> None:
    hasty, permits = Terms(limits=ToolLimits(queue_seconds=4)), Permits(1)
    assert sorted(await run(permits, ("a", Terms()), ("b", hasty))) == [(0, "a"), (4, "none")]
    assert await run(permits, ("a", Terms())) == [(0, "a")]


def test_a_cap_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="max_concurrency must be at least 1"):
        Terms(max_concurrency=0)
