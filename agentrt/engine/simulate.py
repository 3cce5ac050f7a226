"""An engine that costs time instead of computing: the real service, core, scheduler, pages, tiers and policy in virtual time.

Steps take what a roofline says of a device and a model's shape, copies what a link of a given speed does; which ids come is
the caller's word (`Script`). Steps run in the event loop, in a task of the service's own, since a thread would take real time.
"""

from collections.abc import Collection, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import anyio
import numpy as np

from agentrt.core import clock
from agentrt.core.errors import WeightsError
from agentrt.core.protocol import EngineInfo, WeightSource
from agentrt.core.spec import EngineSpec
from agentrt.engine.batch import Batch
from agentrt.engine.kv.group import size_groups
from agentrt.engine.kv.pages import PageCopy
from agentrt.engine.kv.tiers import Direction, Event, Host
from agentrt.engine.sampler import Drawn, Logits
from agentrt.engine.sequence import Sequence as EngineSequence
from agentrt.engine.service import Command, EngineService
from agentrt.engine.step import EngineCore, Update
from agentrt.engine.weights import Install

NO_LOGITS = np.empty((0, 0), dtype=np.float32)
LOGPROB = -1.0
"""Of every id that is drawn."""


class Device(NamedTuple):
    """What a GPU can do. The shares are what good kernels reach of it."""

    flops: float
    """A second, dense, in the type that is computed in."""
    bytes_per_second: float
    memory_bytes: float
    flops_share: float = 0.45
    bytes_share: float = 0.8
    memory_share: float = 0.9
    """For weights and KV."""
    step_seconds: float = 0.001
    """Of every step: launches, sampling, what the host does between two steps."""


class Shape(NamedTuple):
    """A dense model with attention, two bytes a number."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_size: int = 128

    @property
    def token_bytes(self) -> int:
        """Of KV: K and V of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2

    @property
    def row_key_flops(self) -> int:
        """Of a row and a key that it attends: a product for its score and one for the sum, each of two operations."""
        return 4 * self.layers * self.heads * self.head_size


DEVICES = {"h200": Device(989e12, 4.8e12, 141e9)}
SHAPES = {
    "qwen3-0.6b": Shape(0.6e9, 28, 16, 8), "qwen3-8b": Shape(8.2e9, 36, 32, 8), "qwen3-32b": Shape(32.8e9, 64, 64, 8)
}  # fmt: skip


class Roofline(NamedTuple):
    """A step takes the longer of its arithmetic and its reads: weights once, and the KV of every sequence once."""

    device: Device
    shape: Shape

    @property
    def pool_tokens(self) -> int:
        """Ids whose KV fits beside the weights."""
        room = self.device.memory_share * self.device.memory_bytes - 2 * self.shape.parameters
        return int(room / self.shape.token_bytes)

    @property
    def cost_per_key(self) -> float:
        """What a row costs more for each key it attends, in rows that attend nothing."""
        return self.shape.row_key_flops / (2 * self.shape.parameters)

    def seconds(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Of a step over these: from which position on, how many rows."""
        rows = row_keys = keys = 0.0
        for start, length in chunks:
            rows += length
            row_keys += length * (start + (length + 1) / 2)
            keys += start + length
        flops = 2 * self.shape.parameters * rows + self.shape.row_key_flops * row_keys
        read = 2 * self.shape.parameters + self.shape.token_bytes * keys
        device = self.device
        work = max(flops / (device.flops * device.flops_share), read / (device.bytes_per_second * device.bytes_share))
        return device.step_seconds + work


class Ahead:
    """The clock of an engine that has spent time which the event loop has not slept yet."""

    __slots__ = ("spent",)

    def __init__(self) -> None:
        self.spent = 0.0

    def __call__(self) -> float:
        return clock.now() + self.spent

    def take(self) -> float:
        """What is to be slept."""
        spent, self.spent = self.spent, 0.0
        return spent


class VirtualCopier:
    """`kv.tiers.Copier` that moves nothing: each direction does one job after the other at the link's speed."""

    def __init__(self, now: Ahead, page_bytes: Sequence[int], bytes_per_second: float) -> None:
        self._now, self._page_bytes, self.bytes_per_second = now, page_bytes, bytes_per_second
        self._free_at: dict[Direction, float] = {"save": 0.0, "load": 0.0}

    def start(self, direction: Direction, copies: Sequence[PageCopy]) -> Event:
        size = sum(self._page_bytes[copy.group] for copy in copies)
        begins = max(self._now(), self._free_at[direction])
        ends = self._free_at[direction] = begins + size / self.bytes_per_second
        return _VirtualEvent(self._now, ends)

    def close(self) -> None:
        """It holds nothing."""


class _VirtualEvent:
    """Done at a time. To wait for it spends that time."""

    failed: Collection[int] = ()
    checksums: Sequence[int] = ()

    def __init__(self, now: Ahead, ends: float) -> None:
        self._now, self._ends = now, ends

    @property
    def is_done(self) -> bool:
        return self._now() >= self._ends - 1e-12

    def wait(self, seconds: float) -> bool:
        self._now.spent += max(min(self._ends - self._now(), seconds), 0.0)
        return self.is_done


class VirtualRunner:
    """`engine.step.Runner` without a model: it holds the memory's sizes. `SimulatedCore` costs the steps."""

    def __init__(self, roofline: Roofline, spec: EngineSpec, host_tokens: int, link: float) -> None:
        self.now, self.roofline, self.page_size = Ahead(), roofline, spec.page_size
        self.groups, self.cost_per_key = size_groups((0,), spec), roofline.cost_per_key
        page_bytes = [roofline.shape.token_bytes * spec.page_size]
        self.host = Host([host_tokens // spec.page_size], page_bytes, VirtualCopier(self.now, page_bytes, link))

    def run(self, batch: Batch) -> Logits:
        raise AssertionError("a simulated step builds no batch")

    def copy_page(self, copy: PageCopy) -> None:
        """Takes no time."""

    def stage(self, source: WeightSource) -> Install:
        raise WeightsError("a simulated engine has no weights to update")


class Script(Protocol):
    """What the policy says."""

    def next_id(self, sequence: EngineSequence) -> int:
        """The id that comes next in a turn."""


class SimulatedCore(EngineCore):
    """`EngineCore` whose steps take time and compute nothing."""

    def __init__(self, runner: VirtualRunner, spec: EngineSpec, script: Script, vocab_size: int) -> None:
        super().__init__(runner, spec, vocab_size=vocab_size, bytes_of=lambda _: b"", clock=runner.now)
        self._roofline, self._now, self._script = runner.roofline, runner.now, script

    def _run(self, chunks: list[tuple[EngineSequence, int]]) -> tuple[list[EngineSequence], Logits]:
        self._now.spent += self._roofline.seconds((sequence.lease.computed, count) for sequence, count in chunks)
        return [sequence for sequence, count in chunks if count == sequence.num_uncomputed], NO_LOGITS

    def _commit(self, sampling: Sequence[EngineSequence], logits_MV: Logits) -> None:
        for sequence in sampling:
            self._append(sequence, Drawn(self._script.next_id(sequence), LOGPROB, LOGPROB, 0.0))


class SimulatedEngine(EngineService):
    """`EngineService` in virtual time: its steps run in a task of the event loop."""

    def __init__(self, core: SimulatedCore, info: EngineInfo, now: Ahead) -> None:
        super().__init__(core, info)
        self._now = now
        self._posted = anyio.Event()

    def post(self, command: Command) -> None:
        """Have `command` run before the next step."""
        self._commands.append(command)
        self._posted.set()

    async def __aenter__(self) -> Self:
        self._steps = await anyio.create_task_group().__aenter__()
        self._steps.start_soon(self._step)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        self._posted.set()
        await self._steps.__aexit__(None, None, None)
        self.core.stop()
        if error is None:
            self._raise_crash()

    async def _step(self) -> None:
        """Step after step, as the step thread does; a bug ends every request with `EngineFailure`."""
        try:
            while not self._is_closing or self._commands:
                while self._commands:
                    self._commands.popleft()()
                if self.core.is_idle:
                    self._posted = anyio.Event()
                    await self._posted.wait()
                    continue
                finished = self.core.step()
                await anyio.sleep(self._now.take())
                self._finish(finished)
        except Exception as error:  # a bug, of whatever kind: every request is told, and nobody waits for ever
            self._crash = error
            self._finish(list(self._waiting))

    def _finish(self, finished: Sequence[EngineSequence | Update]) -> None:
        self._finished.extend(finished)
        self._announce_finished()
