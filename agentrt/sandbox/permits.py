"""`Permits`: how many calls run at one time, of all tools of a run and of each. A call waits its turn, but not for ever.

The wait is charged to nobody: a tool's time begins when its process is there.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio

from agentrt.core import clock
from agentrt.sandbox.terms import Terms


class Permits:
    """Shared by all sandboxes of a run; `total` calls at one time."""

    def __init__(self, total: int) -> None:
        self._all = anyio.CapacityLimiter(total)
        self._of_tool: dict[tuple[str, ...], anyio.CapacityLimiter] = {}

    @asynccontextmanager
    async def permit(self, argv: Sequence[str], terms: Terms) -> AsyncIterator[float]:
        """Hold the permits of one call; gives the seconds waited. Raises `TimeoutError` after `limits.queue_seconds`.

        The tool's own comes first: who waits for that keeps no place from other tools.
        """
        started = clock.now()
        async with AsyncExitStack() as held:
            with anyio.fail_after(terms.limits.queue_seconds):
                for limiter in self._needed(tuple(argv), terms):
                    await limiter.acquire_on_behalf_of(borrower := object())
                    held.callback(limiter.release_on_behalf_of, borrower)
            yield clock.now() - started

    def _needed(self, argv: tuple[str, ...], terms: Terms) -> list[anyio.CapacityLimiter]:
        if terms.max_concurrency is None:
            return [self._all]
        own = self._of_tool.setdefault(argv, anyio.CapacityLimiter(terms.max_concurrency))
        return [own, self._all]
