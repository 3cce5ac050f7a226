"""Copies of pages between a device and the host, by one thread for each direction.

The state machine over the pages (`kv.tiers`) is the same wherever the bytes are. What differs is who moves them: a `Mover`.
The step thread never moves any; it leaves a mark behind what was computed, and goes on.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import Any, NamedTuple, Protocol, cast
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from agentrt.engine.kv.pages import PageCopies, PageCopy, singly
from agentrt.engine.kv.tiers import Direction

Arena = Sequence[NDArray[Any]]
"""For each cache group an array of pages, a page contiguous."""
FIRST_GUESS = 2e9
"""Bytes a second, before anything was copied."""
SMOOTHING = 0.2


class Moved(NamedTuple):
    """What copies came to."""

    size: int
    """Bytes."""
    seconds: float
    """That they took, not what they waited for before."""


class Mover(Protocol):
    """Two memories, and the way between them. Each direction is one thread's; `mark` is the step thread's."""

    def mark(self) -> Any:
        """Behind everything that was computed until now."""

    def move(self, direction: Direction, copies: Sequence[PageCopy], mark: Any) -> Moved:
        """Copy pages, from the mark on; returns when the last copy has ended."""

    def checksum(self, direction: Direction, copy: PageCopy) -> int:
        """Of the page that a copy has written."""

    def close(self) -> None:
        """Give back what it holds. Nothing is moved afterwards."""


class ThreadCopier:
    """`kv.tiers.Copier` by a mover. `checks` has every copy summed up, so that a page that changed is not used."""

    def __init__(self, mover: Mover, *, checks: bool = False) -> None:
        self.mover, self.checks = mover, checks
        self.bytes_per_second = FIRST_GUESS
        self._threads = {
            direction: ThreadPoolExecutor(1, f"agentrt-{direction}")
            for direction in cast(list[Direction], ["save", "load"])
        }

    def start(self, direction: Direction, copies: Sequence[PageCopies]) -> "ThreadEvent":
        single = singly(copies)
        work = self._threads[direction].submit(self._copy, direction, single, self.mover.mark())
        return ThreadEvent(work, len(single))

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self.mover.close()

    def _copy(self, direction: Direction, copies: Sequence[PageCopy], mark: Any) -> list[int]:
        size, seconds = self.mover.move(direction, copies, mark)
        self.bytes_per_second += SMOOTHING * (size / max(seconds, 1e-9) - self.bytes_per_second)
        return [self.mover.checksum(direction, copy) for copy in copies] if self.checks else []


class HostMover:
    """Both memories are this machine's own: what is computed was computed before a copy is asked for."""

    def __init__(self, device: Arena, host: Arena) -> None:
        self.device, self.host = device, host

    def mark(self) -> None:
        """Nothing is under way."""

    def move(self, direction: Direction, copies: Sequence[PageCopy], mark: None) -> Moved:
        source, target = (self.device, self.host) if direction == "save" else (self.host, self.device)
        started, size = perf_counter(), 0
        for copy in copies:
            page = source[copy.group][copy.source]
            np.copyto(target[copy.group][copy.target], page)
            size += page.nbytes
        return Moved(size, perf_counter() - started)

    def checksum(self, direction: Direction, copy: PageCopy) -> int:
        return crc32((self.host if direction == "save" else self.device)[copy.group][copy.target].data)

    def close(self) -> None:
        """It holds nothing of its own."""


class ThreadEvent:
    """`kv.tiers.Event` of copies that a thread makes."""

    def __init__(self, work: "Future[list[int]]", count: int) -> None:
        self._work, self._count = work, count

    @property
    def is_done(self) -> bool:
        return self._work.done()

    @property
    def failed(self) -> Collection[int]:
        """All of its copies, if the thread raised."""
        return range(self._count) if self._work.exception() else ()

    @property
    def checksums(self) -> Sequence[int]:
        return () if self._work.exception() else self._work.result()

    def wait(self, seconds: float) -> bool:
        return bool(wait([self._work], timeout=seconds).done)
