"""`Permits`: how many calls run at one time, of all tools of a run and of each. A call waits its turn, but not for ever.

The wait is charged to nobody: a tool's time begins when its process is there.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import anyio

from agentrt.core import clock
from agentrt.sandbox.terms import Terms


class Permit:
    """A context manager: leaving it lets the next call run."""

    __slots__ = ("held", "waited")

    def __init__(self) -> None:
        self.held: list[anyio.CapacityLimiter] = []
        self.waited = 0.0
        """Seconds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.held:
            self.held.pop().release_on_behalf_of(self)


class Permits:
    """Shared by all sandboxes of a run; `total` calls at one time."""

    def __init__(self, total: int) -> None:
        self._all = anyio.CapacityLimiter(total)
        self._of_tool: dict[tuple[str, ...], anyio.CapacityLimiter] = {}

    async def permit(self, argv: Sequence[str], terms: Terms) -> Permit:
        """A permit for one call, for the caller to enter at once. Raises `TimeoutError` after `limits.queue_seconds`.

        The tool's own place comes first: who waits for that keeps none from other tools.
        """
        permit, started = Permit(), clock.now()
        try:
            for limiter in self._needed(tuple(argv), terms):
                try:
                    limiter.acquire_on_behalf_of_nowait(permit)
                except anyio.WouldBlock:
                    with anyio.fail_after(started + terms.limits.queue_seconds - clock.now()):
                        await limiter.acquire_on_behalf_of(permit)
                permit.held.append(limiter)
        except BaseException:
            with permit:
                raise
        permit.waited = clock.now() - started
        return permit

    def _needed(self, argv: tuple[str, ...], terms: Terms) -> list[anyio.CapacityLimiter]:
        if terms.places is None:
            return [self._all]
        own = self._of_tool.setdefault(argv, anyio.CapacityLimiter(terms.places))
        return [own, self._all]
