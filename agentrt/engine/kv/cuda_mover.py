"""Copies of pages between a GPU and pinned memory of the host: a stream for each direction, events as fences.

A direction's thread queues a job's copies behind the event that the step thread left, and sleeps until they have ended; what
is computed meanwhile does not wait for them. Pages that follow one another on both sides are one copy of the driver's.
Where copies are so small that the driver takes longer for one than the bus does, a kernel makes them all.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from agentrt.core.errors import UsageError
from agentrt.engine.kv.copier import Moved
from agentrt.engine.kv.pages import PageCopy
from agentrt.engine.kv.tiers import Direction
from agentrt_kernels.swap.launch import copy_pages

SMALL_BYTES = 1 << 16
"""Of a driver's copy: it takes as long as starting it, some microseconds."""


class Stretch(NamedTuple):
    """Pages of one group that follow one another on both sides."""

    group: int
    source: int
    target: int
    pages: int


class CudaMover:
    """`kv.copier.Mover`. Pages are the rows of bytes tensors, one tensor for each cache group and side.

    It pins the host's pages once, and lets go of them when it is closed. `cuda` is torch's module, or what stands for
    it in a test. `UsageError` if the memory cannot be pinned.
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor], cuda: Any = torch.cuda) -> None:
        self.device, self.host, self._cuda = device, host, cuda
        self._streams = {"save": cuda.Stream(), "load": cuda.Stream()}
        self._pinned: list[Tensor] = []
        for pages_PB in host:
            self._pin(pages_PB)

    def mark(self) -> Any:
        """An event on the stream of the thread that computes."""
        return self._cuda.current_stream().record_event()

    def move(self, direction: Direction, copies: Sequence[PageCopy], mark: Any) -> Moved:
        sources, targets = (self.device, self.host) if direction == "save" else (self.host, self.device)
        stream = self._streams[direction]
        began, ended = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True, blocking=True)
        with self._cuda.stream(stream):
            stream.wait_event(mark)
            began.record()
            for group, of_group in groupby(sorted(copies), key=lambda copy: copy.group):
                _copy(sources[group], targets[group], list(of_group))
            ended.record()
        ended.synchronize()
        size = sum(int(sources[copy.group].shape[1]) for copy in copies)
        return Moved(size, began.elapsed_time(ended) / 1e3)

    def checksum(self, direction: Direction, copy: PageCopy) -> int:
        """A page of the device is copied back for it, on the stream that brought it."""
        pages_PB = (self.host if direction == "save" else self.device)[copy.group]
        with self._cuda.stream(self._streams[direction]):
            return crc32(pages_PB[copy.target].cpu().numpy().data)

    def close(self) -> None:
        while self._pinned:
            self._cuda.check_error(self._cuda.cudart().cudaHostUnregister(self._pinned.pop().data_ptr()))

    def _pin(self, pages_PB: Tensor) -> None:
        """In place: torch's allocator of pinned memory would round the size up to a power of two."""
        if not pages_PB.numel():
            return
        try:
            self._cuda.check_error(self._cuda.cudart().cudaHostRegister(pages_PB.data_ptr(), pages_PB.numel(), 0))
        except RuntimeError as error:
            self.close()
            raise UsageError(
                f"engine.host_tokens: {pages_PB.numel()} bytes cannot be pinned for it ({error}); ask for fewer tokens"
            ) from error
        self._pinned.append(pages_PB)


def stretches(copies: Sequence[PageCopy]) -> list[Stretch]:
    """The same copies, sorted ones of one group, with neighbours put together."""
    found: list[Stretch] = []
    for group, source, target in copies:
        if found and (source, target) == (found[-1].source + found[-1].pages, found[-1].target + found[-1].pages):
            found[-1] = found[-1]._replace(pages=found[-1].pages + 1)
        else:
            found.append(Stretch(group, source, target, 1))
    return found


def _copy(source_PB: Tensor, target_PB: Tensor, copies: Sequence[PageCopy]) -> None:
    found = stretches(copies)
    if len(copies) * source_PB.shape[1] < SMALL_BYTES * len(found):
        copy_pages(source_PB, target_PB, [copy.source for copy in copies], [copy.target for copy in copies])
        return
    for _, source, target, count in found:
        target_PB[target : target + count].copy_(source_PB[source : source + count], non_blocking=True)
