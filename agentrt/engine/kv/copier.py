"""Copies between two arenas in this machine's memory, by one thread for each direction.

The state machine over the pages (`kv.tiers`) is the same wherever the bytes are; on a machine without a GPU both arenas are
ordinary memory, and what is computed is computed before a copy of it is asked for.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import Any, cast
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from agentrt.engine.kv.pages import PageCopy
from agentrt.engine.kv.tiers import Direction

Arena = Sequence[NDArray[Any]]
"""For each cache group an array of pages, a page contiguous."""
FIRST_GUESS = 2e9
"""Bytes a second, before anything was copied."""
SMOOTHING = 0.2


class ThreadCopier:
    """`kv.tiers.Copier` over two arenas. `checks` has every copy summed up, so that a page that changed is not used."""

    def __init__(self, device: Arena, host: Arena, *, checks: bool = False) -> None:
        self.device, self.host, self.checks = device, host, checks
        self.bytes_per_second = FIRST_GUESS
        self._threads = {
            direction: ThreadPoolExecutor(1, f"agentrt-{direction}")
            for direction in cast(list[Direction], ["save", "load"])
        }

    def start(self, direction: Direction, copies: Sequence[PageCopy]) -> "ThreadEvent":
        return ThreadEvent(self._threads[direction].submit(self._copy, direction, tuple(copies)), len(copies))

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()

    def _copy(self, direction: Direction, copies: Sequence[PageCopy]) -> list[int]:
        source, target = (self.device, self.host) if direction == "save" else (self.host, self.device)
        started, size = perf_counter(), 0
        for copy in copies:
            page = source[copy.group][copy.source]
            np.copyto(target[copy.group][copy.target], page)
            size += page.nbytes
        rate = size / max(perf_counter() - started, 1e-9)
        self.bytes_per_second += SMOOTHING * (rate - self.bytes_per_second)
        return [crc32(target[copy.group][copy.target].data) for copy in copies] if self.checks else []


class ThreadEvent:
    """`kv.tiers.Event` of a job that a thread does."""

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
