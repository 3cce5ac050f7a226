"""The loop watchdog names who holds the loop, and nobody else."""

import time

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from agentrt.report.watchdog import watching_loop


async def holds_the_loop(seconds: float) -> None:
    def works() -> None:
        time.sleep(seconds)  # on purpose

    works()
    await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_the_coroutine_that_holds_the_loop_is_named_once() -> None:
    with capture_logs() as logs:
        async with watching_loop(0.04):
            await anyio.sleep(0.05)
            for _ in range(2):
                await holds_the_loop(0.5)
    # a machine under load holds the loop too, at other lines
    (details,) = [details for details in logs if "works()" in details.get("frames", "")]
    (event,) = [event for event in logs if event["event"] == "loop_held" and event["at"] == details["at"]]
    assert (event["coroutine"], event["log_level"]) == ("holds_the_loop", "warning")
    assert event["seconds"] >= 0.04


@pytest.mark.anyio
async def test_a_loop_that_many_share_is_left_in_peace() -> None:
    async def busy() -> None:
        for _ in range(20):
            await anyio.sleep(0.001)

    with capture_logs() as logs:
        async with watching_loop(10.0), anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(busy)
    assert logs == []


def test_nothing_is_watched_in_virtual_time(virtual_time: tuple[str, dict[str, object]]) -> None:
    async def main() -> None:
        async with watching_loop():
            await anyio.sleep(3600)

    backend, options = virtual_time
    anyio.run(main, backend=backend, backend_options=options)
