"""`FaultyCopier`: moves the pages of a toy runner between its tiers, as late and as badly as a test asks for."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrt.engine.kv.pages import PageCopies, PageCopy, singly
from agentrt.engine.kv.tiers import Direction

POISON = -7
"""What a copy that fails leaves behind."""


class FaultyCopier:
    """`engine.kv.tiers.Copier` over arrays of pages, without threads.

    A copy is seen to have ended `delay` looks after it was started (a number, or a function that gives one), or when
    somebody waits for it; the bytes move at that moment, so a page that was given away too early shows. `fails(direction,
    copy)` says which copies come to nothing. With `checks`, copies have checksums.
    """

    def __init__(self, *, delay: int | Callable[[], int] = 0, checks: bool = False) -> None:
        self.device: Sequence[NDArray[Any]] = ()
        self.host: Sequence[NDArray[Any]] = ()
        self.delay, self.checks = delay, checks
        self.fails: Callable[[Direction, PageCopy], bool] = lambda direction, copy: False
        self.bytes_per_second = 1e12
        self.started: dict[Direction, list[PageCopy]] = {"save": [], "load": []}
        """All copies ever asked for."""
        self.is_stuck = False
        """No copy ends any more, whoever waits for it."""
        self._jobs: dict[Direction, deque[FaultyEvent]] = {"save": deque(), "load": deque()}

    def start(self, direction: Direction, copies: Sequence[PageCopies]) -> "FaultyEvent":
        self.started[direction] += singly(copies)
        looks = self.delay() if callable(self.delay) else self.delay
        event = FaultyEvent(self, direction, singly(copies), looks)
        self._jobs[direction].append(event)
        return event

    def close(self) -> None:
        """Nothing works for it."""

    def finish(self, event: "FaultyEvent") -> None:
        """Make the copies of a job, and of those before it."""
        jobs = self._jobs[event.direction]
        while not event.is_made:
            jobs.popleft().make(*((self.device, self.host) if event.direction == "save" else (self.host, self.device)))


class FaultyEvent:
    """The end of one job of a `FaultyCopier`."""

    def __init__(self, copier: FaultyCopier, direction: Direction, copies: Sequence[PageCopy], looks: int) -> None:
        self.copier, self.direction, self.copies, self.looks = copier, direction, copies, looks
        self.is_made = False
        self.failed: Collection[int] = ()
        self.checksums: Sequence[int] = ()

    @property
    def is_done(self) -> bool:
        self.looks -= 1
        if self.looks < 0 and not self.is_made and not self.copier.is_stuck:
            self.copier.finish(self)
        return self.is_made

    def wait(self, seconds: float) -> bool:
        if not self.copier.is_stuck and not self.is_made:
            self.copier.finish(self)
        return self.is_made

    def make(self, source: Sequence[NDArray[Any]], target: Sequence[NDArray[Any]]) -> None:
        """Move the bytes."""
        self.is_made = True
        self.failed = [index for index, copy in enumerate(self.copies) if self.copier.fails(self.direction, copy)]
        for index, copy in enumerate(self.copies):
            page = source[copy.group][copy.source]
            target[copy.group][copy.target] = POISON if index in self.failed else page
        if self.copier.checks:
            pages = [target[copy.group][copy.target] for copy in self.copies]
            self.checksums = [hash(np.asarray(page).tobytes()) for page in pages]
