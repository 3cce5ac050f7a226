"""The fences of copies from and to a GPU, on a device that does what it was told in any order that they allow."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrt.core.errors import UsageError
from agentrt.engine.kv.copier import Moved, ThreadCopier
from agentrt.engine.kv.pages import PageCopies, PageCopy

pytest.importorskip("triton")

from agentrt.engine.kv import cuda_mover
from agentrt.engine.kv.cuda_mover import CudaMover, Stretch, stretches


class FakeEvent:
    """Reached or not, at an end of a stream."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda, self.is_reached = cuda, False

    def record(self) -> None:
        self.cuda.now.work.append((lambda: True, lambda: setattr(self, "is_reached", True)))

    def synchronize(self) -> None:
        while not self.is_reached:
            self.cuda.advance()

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert self.is_reached
        assert other.is_reached
        return 2.0


class FakeStream:
    """Work in order: what may have to wait, and what it does."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda, self.work = cuda, deque[tuple[Callable[[], bool], Callable[[], None]]]()
        cuda.streams.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.work.append((lambda: event.is_reached, lambda: None))

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.cuda)
        event.record()
        return event


class FakeCuda:
    """What `CudaMover` uses of `torch.cuda`; streams go on in a random order, one piece of work at a time."""

    def __init__(self, seed: int = 0) -> None:
        self.streams: list[FakeStream] = []
        self.random = Random(seed)
        self.compute = self.now = FakeStream(self)
        self.registered: list[int] = []
        self.most_registered = 10**9

    def Stream(self) -> FakeStream:  # noqa: N802 (torch's name)
        return FakeStream(self)

    def Event(self, **_: bool) -> FakeEvent:  # noqa: N802
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return self.now

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def advance(self) -> None:
        ready = [stream for stream in self.streams if stream.work and stream.work[0][0]()]
        self.random.choice(ready).work.popleft()[1]()

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.registered.remove)

    def check_error(self, error: int | None) -> None:
        if error:
            raise RuntimeError("out of memory")

    def _register(self, address: int, size: int, _: int) -> int:
        if size <= self.most_registered:
            self.registered.append(address)
        return int(size > self.most_registered)


class FakePages:
    """A number for each page; copies are work of the stream that is current."""

    shape = (8, cuda_mover.SMALL_BYTES)

    def __init__(self, cuda: FakeCuda, numbers: list[int], at: slice = slice(0, 8)) -> None:
        self.cuda, self.numbers, self.at = cuda, numbers, at

    def __getitem__(self, at: slice) -> "FakePages":
        return FakePages(self.cuda, self.numbers, at)

    def copy_(self, source: "FakePages", *, non_blocking: bool) -> None:
        assert non_blocking
        for to, page in zip(
            range(self.at.start, self.at.stop), range(source.at.start, source.at.stop), strict=True
        ):  # page by page: the device may do something else in the middle
            self.cuda.now.work.append((lambda: True, lambda to=to, page=page: self._set(to, source.numbers[page])))

    def numel(self) -> int:
        return len(self.numbers)

    def data_ptr(self) -> int:
        return id(self.numbers)

    def _set(self, page: int, number: int) -> None:
        self.numbers[page] = number


def compute(cuda: FakeCuda, work: Callable[[], object]) -> None:
    cuda.compute.work.append((lambda: True, lambda: (work(), None)[1]))


@given(st.integers(0, 10**6))
def test_a_save_has_what_was_computed_before_it_and_a_load_waits_for_its_readers(seed: int) -> None:
    """Fences (a) and (b), for any order in which the streams go on."""
    cuda = FakeCuda(seed)
    device, host = [0] * 8, [-1, -2, -3, -4, -5, -6, -7, -8]
    mover = CudaMover([FakePages(cuda, device)], [FakePages(cuda, host)], cuda)  # type: ignore[list-item]
    read: list[int] = []
    for page in range(4):
        compute(cuda, lambda page=page: device.__setitem__(page, 10 + page))
    mark = mover.mark()
    compute(cuda, lambda: device.__setitem__(7, 99))  # goes on beside the copies
    copies = [PageCopy(0, 3, 0), PageCopy(0, 1, 5), PageCopy(0, 2, 6)]
    assert mover.move("save", copies, mark) == Moved(3 * cuda_mover.SMALL_BYTES, 0.002)
    assert host == [13, -2, -3, -4, -5, 11, 12, -8]

    for page in (4, 5):
        compute(cuda, lambda page=page: read.append(device[page]))
    mark = mover.mark()
    mover.move("load", [PageCopy(0, 5, 4), PageCopy(0, 0, 5)], mark)
    assert (read, device[4:6]) == ([0, 0], [11, 13])
    mover.close()
    assert cuda.registered == []


def test_neighbours_on_both_sides_are_one_copy() -> None:
    copies = [PageCopy(1, 2, 7), PageCopy(1, 3, 8), PageCopy(1, 4, 3), PageCopy(1, 6, 4), PageCopy(1, 7, 5)]
    assert stretches(copies) == [Stretch(1, 2, 7, 2), Stretch(1, 4, 3, 1), Stretch(1, 6, 4, 2)]
    assert stretches([]) == []


class EagerCuda(FakeCuda):
    """It does everything at once, for tensors of this machine."""

    def advance(self) -> None:
        for stream in self.streams:
            while stream.work:
                stream.work.popleft()[1]()


@pytest.mark.parametrize("page_bytes", [1024, cuda_mover.SMALL_BYTES])
def test_bytes_there_and_back_by_kernel_and_by_driver(device: str, page_bytes: int) -> None:
    """Through the copier, with checksums; a page that changed on the host meanwhile gives itself away."""
    if device != "cpu":
        pytest.skip("this is for machines without a GPU")
    pools = [torch.randint(0, 256, (6, size), dtype=torch.uint8) for size in (page_bytes, 512)]
    before = [pool.clone() for pool in pools]
    host = [torch.zeros(4, size, dtype=torch.uint8) for size in (page_bytes, 512)]
    cuda = EagerCuda()
    copier = ThreadCopier(CudaMover(pools, host, cuda), checks=True)
    assert len(cuda.registered) == 2
    saved = copier.start("save", [PageCopies(1, [5], [0]), PageCopies(0, [2, 3], [1, 2])])
    assert saved.wait(20)
    assert torch.equal(host[0][1:3], pools[0][2:4])
    assert torch.equal(host[1][0], pools[1][5])
    host[0][2, 0] ^= 1
    loaded = copier.start("load", [PageCopies(1, [0], [0]), PageCopies(0, [1, 2], [4, 5])])
    assert loaded.wait(20)
    assert torch.equal(pools[0][4], before[0][2])
    assert torch.equal(pools[1][0], before[1][5])
    assert [one == other for one, other in zip(loaded.checksums, saved.checksums, strict=True)] == [True, True, False]
    copier.close()
    assert cuda.registered == []


def test_memory_that_cannot_be_pinned_is_refused_and_none_stays_pinned() -> None:
    cuda = FakeCuda()
    cuda.most_registered = 100
    pages = [torch.zeros(4, size, dtype=torch.uint8) for size in (16, 100)]
    with pytest.raises(UsageError, match=r"engine.host_tokens: 400 bytes cannot be pinned for it \(out of memory\)"):
        CudaMover(pages, pages, cuda)
    assert cuda.registered == []
