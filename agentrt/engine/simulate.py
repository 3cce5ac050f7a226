"""An engine that costs time instead of computing: the real service, core, scheduler, pages, tiers and policy in virtual time.

Steps take what a roofline says of a device and a model's shape, copies what a link of a given speed does; which ids come is
the caller's word (`Script`). Steps run in the event loop, in a task of the service's own, since a thread would take real time.

While the same sequences decode and nobody else is to act, steps differ by their number only. Then the rows of many are done
together (`SimulatedCore._leap`): all that a step decides is decided in each, at its own time, and the result is the same.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import anyio
import numpy as np

from agentrt.core import clock
from agentrt.core.errors import WeightsError
from agentrt.core.protocol import EngineInfo, WeightSource
from agentrt.core.spec import EngineSpec
from agentrt.core.tokens import Floats, Ids
from agentrt.engine.batch import Batch
from agentrt.engine.kv.group import size_groups
from agentrt.engine.kv.lease import Lease
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
ONE_LOGPROB = Floats([LOGPROB])


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
        return self.seconds_of(rows, row_keys, keys)

    def seconds_of(self, rows: float, row_keys: float, keys: float) -> float:
        """Of a step with so many rows, pairs of a row and a key that it attends, and keys that are read."""
        flops = 2 * self.shape.parameters * rows + self.shape.row_key_flops * row_keys
        read = 2 * self.shape.parameters + self.shape.token_bytes * keys
        device = self.device
        work = max(flops / (device.flops * device.flops_share), read / (device.bytes_per_second * device.bytes_share))
        return device.step_seconds + work


class Ahead:
    """The clock of an engine that has spent time which the event loop has not slept yet."""

    __slots__ = ("_loop", "spent")

    def __init__(self) -> None:
        self.spent = self._loop = 0.0

    def __call__(self) -> float:
        return self._loop + self.spent

    def look(self) -> None:
        """Read the loop's clock, as whoever has waited must."""
        self._loop = clock.now()

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


class Say(NamedTuple):
    """A turn: the same id over and over, and an id that ends it."""

    token_id: int
    length: int
    """Ids in all."""
    end_id: int


class Script(Protocol):
    """What the policy says."""

    def say(self, sequence: EngineSequence) -> Say:
        """The turn of a sequence that samples its first id."""


class SimulatedCore(EngineCore):
    """`EngineCore` whose steps take time and compute nothing.

    `horizon` says until when nobody else acts: steps that begin before are done together where that makes no difference.
    """

    def __init__(
        self, runner: VirtualRunner, spec: EngineSpec, script: Script, vocab_size: int,
        horizon: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__(runner, spec, vocab_size=vocab_size, bytes_of=lambda _: b"", clock=runner.now)
        self._roofline, self._now, self._script, self._horizon = runner.roofline, runner.now, script, horizon
        self._says: dict[EngineSequence, Say] = {}

    def step(self) -> list[EngineSequence]:
        """See `EngineCore.step`; as many as begin before anybody else acts, of which only the last one ends sequences."""
        until, finished = self._horizon(), list[EngineSequence]()
        while not finished:
            leapt = self._leap(until)
            finished = super().step() if leapt is None else leapt
            if self._now() >= until or self.is_idle:
                break
        return finished

    def _run(self, chunks: list[tuple[EngineSequence, int]]) -> tuple[list[EngineSequence], Logits]:
        self._now.spent += self._roofline.seconds((sequence.lease.computed, count) for sequence, count in chunks)
        return [sequence for sequence, count in chunks if count == sequence.num_uncomputed], NO_LOGITS

    def _commit(self, sampling: Sequence[EngineSequence], logits_MV: Logits) -> None:
        for sequence in sampling:
            if sequence.num_noted == 0:
                self._says[sequence] = self._script.say(sequence)
            self._say(sequence, 1)

    def _leave(self, sequence: EngineSequence) -> None:
        self._says.pop(sequence, None)
        super()._leave(sequence)

    def _say(self, sequence: EngineSequence, count: int) -> None:
        """Append the next `count` ids of a turn; the first one, and the last, as every engine does."""
        say, said = self._says[sequence], sequence.num_noted
        is_last = said + count == say.length
        plain = count - (said == 0 or is_last)
        if plain == 1:  # as the next branch does it, in a third of the time
            sequence.tokens.commit(say.token_id, LOGPROB, self.version)
            sequence.raw_logprobs.append(LOGPROB)
            sequence.kept_logmass.append(0.0)
        elif plain:
            sequence.tokens.commit_all(Ids([say.token_id]) * plain, ONE_LOGPROB * plain, self.version)
            sequence.raw_logprobs.extend(ONE_LOGPROB * plain)
            sequence.kept_logmass.frombytes(bytes(plain * sequence.kept_logmass.itemsize))
        if plain:
            sequence.counts[say.token_id] += plain
            sequence.num_noted += plain
            self._totals.sampled += plain
        if plain < count:
            self._append(sequence, Drawn(say.end_id if is_last else say.token_id, LOGPROB, LOGPROB, 0.0))

    def _leap(self, until: float) -> list[EngineSequence] | None:
        """Those steps that only add an id to each sequence that runs, and begin before `until`, but one at least; None if
        the next one is not of that kind."""
        rows = [sequence for sequence in self.running if sequence.lease.job is None]
        if self.update or not rows or not all(sequence.is_decoding for sequence in rows):
            return None
        most, steps, growing = self._shortest(rows), 0, self._growing(rows)
        keys = sum(sequence.lease.computed for sequence in rows)
        num_loading = len(self.running) - len(rows)
        while (
            steps < most and (not steps or self._now() < until) and self._goes_on(growing.get(steps, ()), num_loading)
        ):
            started = self._now()
            for lease in growing.get(steps, ()):
                self.cache.grow(lease, len(lease.pages) * self.cache.page_size + 1)
            self._start_copies(self._is_refused)
            attended = keys + steps * len(rows)
            self._now.spent += self._roofline.seconds_of(len(rows), attended + len(rows), attended + len(rows))
            self._step_seconds = self._now() - started
            self.cache.costs.note_work(len(rows), 0.0, attended, self._step_seconds)
            self._totals.steps += 1
            steps += 1
        return self._end_leap(rows, steps) if steps else None

    def _end_leap(self, rows: list[EngineSequence], steps: int) -> list[EngineSequence]:
        for sequence in rows:
            self.cache.advance(sequence.lease, sequence.tokens.token_ids, steps)
            self._say(sequence, steps)
        finished = [sequence for sequence in rows if sequence.is_finished]
        for sequence in finished:
            self._leave(sequence)
        return finished

    def _shortest(self, rows: list[EngineSequence]) -> int:
        """Steps until the first of them ends its turn, or could need a second page."""
        left = min(self._says[sequence].length - sequence.num_noted for sequence in rows)
        return min(left, self.cache.page_size)

    def _growing(self, rows: list[EngineSequence]) -> dict[int, list[Lease]]:
        """Who needs a further page, by the number of the step from now on."""
        growing = defaultdict[int, list[Lease]](list)
        for lease in (sequence.lease for sequence in rows):
            growing[len(lease.pages) * self.cache.page_size - lease.computed].append(lease)
        return growing

    def _goes_on(self, growing: Sequence[Lease], num_loading: int) -> bool:
        """What a step looks at before its rows: copies that ended, the line, pages. False if it has to do more about it."""
        if self.cache.tier.is_copying:
            self._send_back(self.cache.poll())
            if num_loading != sum(sequence.lease.job is not None for sequence in self.running):
                return False
        return not self._hears_line() and len(growing) <= self.cache.pool.num_available


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
                self._now.look()
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
