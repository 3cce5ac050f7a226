"""An engine that costs time instead of computing: the real service, core, scheduler, pages, tiers and policy in virtual time.

Steps take what a roofline says of a device and a model's shape, copies what a link of a given speed does; which ids come is
the caller's word (`Script`). Steps run in the event loop, in a task of the service's own, since a thread would take real time.

While the same sequences decode and nobody else is to act, steps differ by their number only. Then the rows of many are done
together (`SimulatedCore._leap`): all that a step decides is decided in each, at its own time, and the result is the same.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import anyio
import msgspec

from agentrt.core import clock
from agentrt.core.errors import WeightsError
from agentrt.core.protocol import EngineInfo, EngineStatistics, WeightSource
from agentrt.core.spec import EngineSpec
from agentrt.core.tokens import Floats, Ids
from agentrt.engine.batch import Batch
from agentrt.engine.forecast import Int64Array
from agentrt.engine.kv.group import size_groups
from agentrt.engine.kv.pages import PageCopies, PageCopy
from agentrt.engine.kv.tiers import Direction, Event, Host
from agentrt.engine.roster import Roster
from agentrt.engine.sampler import Drawn, Logits
from agentrt.engine.scheduler import Crew
from agentrt.engine.sequence import Sequence as EngineSequence
from agentrt.engine.service import Command, EngineService
from agentrt.engine.step import RESERVE_AFTER, EngineCore, Work
from agentrt.engine.update import Update
from agentrt.engine.weights import Install

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
    """A step takes the longer of arithmetic and reads, in its products with weights, which it reads once, and again in its
    attention, which reads the KV of every sequence once: in each layer the one waits for the other."""

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

    def seconds(self, chunks: Iterable[tuple[int, int]], decodes: int = 0, decode_keys: int = 0) -> float:
        """Of a step over these, from which position on and how many rows, and over `decodes` single rows that follow on
        `decode_keys` keys."""
        rows = float(decodes)
        row_keys = keys = float(decode_keys + decodes)
        for start, length in chunks:
            rows += length
            row_keys += length * (start + (length + 1) / 2)
            keys += start + length
        return self.seconds_of(rows, row_keys, keys)

    def seconds_of(self, rows: float, row_keys: float, keys: float) -> float:
        """Of a step with so many rows, pairs of a row and a key that it attends, and keys that are read."""
        device, shape = self.device, self.shape
        flop, byte = 1 / (device.flops * device.flops_share), 1 / (device.bytes_per_second * device.bytes_share)
        products = 2 * shape.parameters * max(rows * flop, byte)
        attention = max(shape.row_key_flops * row_keys * flop, shape.token_bytes * keys * byte)
        return device.step_seconds + products + attention


class Ahead:
    """The clock of an engine that has spent time which the event loop has not slept yet."""

    __slots__ = ("loop", "spent")

    def __init__(self) -> None:
        self.spent = self.loop = 0.0

    def __call__(self) -> float:
        return self.loop + self.spent

    def look(self) -> None:
        """Read the loop's clock, as whoever has waited must."""
        self.loop = clock.now()

    def take(self) -> float:
        """What is to be slept."""
        spent, self.spent = self.spent, 0.0
        return spent


class VirtualCopier:
    """`kv.tiers.Copier` that moves nothing: each direction does one job after the other at the link's speed."""

    def __init__(self, now: Ahead, page_bytes: Sequence[int], bytes_per_second: float) -> None:
        self._now, self._page_bytes, self.bytes_per_second = now, page_bytes, bytes_per_second
        self._free_at: dict[Direction, float] = {"save": 0.0, "load": 0.0}

    def start(self, direction: Direction, copies: Sequence[PageCopies]) -> Event:
        size = sum(len(some.sources) * self._page_bytes[some.group] for some in copies)
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

    `horizon` says for how many seconds nobody else acts: steps that begin before are done in one go where that makes no
    difference.
    """

    def __init__(
        self, runner: VirtualRunner, spec: EngineSpec, script: Script, vocab_size: int,
        horizon: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__(runner, spec, vocab_size=vocab_size, bytes_of=lambda _: b"", clock=runner.now)
        self._roofline, self._now, self._script, self._horizon = runner.roofline, runner.now, script, horizon
        self.idle_seconds = self.until = 0.0
        """For how long nobody else acted, as of the last step, and when somebody did."""
        self._says: dict[EngineSequence, Say] = {}
        self._roster = Roster(runner.page_size)
        self.cache.on_review = self._count_computed

    def step(self) -> list[EngineSequence]:
        """See `EngineCore.step`; as many as begin before anybody else acts, of which only the last one ends sequences."""
        self.idle_seconds, finished = self._horizon(), list[EngineSequence]()
        self.until = self._now.loop + self.idle_seconds
        while not finished:
            leapt = self._leap(self.until)
            finished = super().step() if leapt is None else leapt
            if self._now() >= self.until or self.is_idle:
                break
        return finished

    def statistics(self, sessions: int) -> EngineStatistics:
        """See `EngineCore.statistics`."""
        counts = super().statistics(sessions)
        return msgspec.structs.replace(counts, tokens_sampled=counts.tokens_sampled + self._roster.unwritten)

    def check(self) -> None:
        """See `EngineCore.check`."""
        super().check()
        self._roster.check()
        assert self._roster.sequences <= set(self.running), "one that does not run is taken to decode"

    def _decoding(self) -> Collection[EngineSequence]:
        return self._roster.sequences

    def _crew(self, decoding: Collection[EngineSequence]) -> Crew:
        roster = self._roster
        return Crew(len(decoding), roster.computed, roster.pages, len(roster.growing), growths=self._growths)

    def _growths(self) -> Int64Array:
        """As `EngineCore._growth` has them."""
        return self._roster.growths(self._lengths, RESERVE_AFTER)

    def _grow(self, work: Work) -> None:
        if work.decoding:
            self._grow_crew()
        super()._grow(work._replace(decoding=()))

    def _grow_crew(self) -> None:
        for member in list(self._roster.growing):
            lease = member.sequence.lease
            self.cache.grow(lease, len(lease.pages) * self.cache.page_size + 1)
            self._roster.grow(member)

    def _compute(self, work: Work) -> list[EngineSequence]:
        chunks = [(sequence.lease.computed, count) for sequence, count in work.chunks]
        self._now.spent += self._roofline.seconds(chunks, work.crew.rows, work.crew.keys)
        finished = self._decode() if work.decoding else []
        for sequence, count in work.chunks:
            is_read = count == sequence.num_uncomputed
            self.cache.advance(sequence.lease, sequence.tokens.token_ids, count)
            if is_read:
                self._speak(sequence)
        return [*finished, *(sequence for sequence, _ in work.chunks if sequence.is_finished)]

    def _decode(self, steps: int = 1) -> list[EngineSequence]:
        """The crew gains an id in each of some steps; returns those whose turns end with the last."""
        ending = [member.sequence for member in self._roster.ending(steps)]
        if len(ending) > 1:
            ending = [sequence for sequence in self.running if sequence in ending]
        for sequence in ending:
            self._write(sequence, steps)
        self._roster.advance(steps)
        return ending

    def _speak(self, sequence: EngineSequence) -> None:
        """A sequence samples the first id of its turn, or goes on with it; from then on it decodes."""
        if sequence.num_noted == 0:
            self._says[sequence] = self._script.say(sequence)
        self._say(sequence, 1)
        if not sequence.is_finished:
            self._roster.join(sequence, self._says[sequence].length - sequence.num_noted)

    def _write(self, sequence: EngineSequence, more: int = 0) -> None:
        """Write down what a sequence has gained, and what it gains with `more` steps. It decodes no more."""
        if member := self._roster.leave(sequence):
            end = self._roster.step + more
            self.cache.advance(sequence.lease, sequence.tokens.token_ids, end - member.counted)
            if end > member.noted:
                self._say(sequence, end - member.noted)

    def _count_computed(self) -> None:
        for member in self._roster.members:
            lease, ids = member.sequence.lease, member.sequence.tokens.token_ids
            self.cache.advance(lease, ids, self._roster.step - member.counted)
            member.counted = self._roster.step

    def _return(self, sequence: EngineSequence) -> None:
        self._write(sequence)
        super()._return(sequence)

    def _leave(self, sequence: EngineSequence) -> None:
        self._write(sequence)
        self._says.pop(sequence, None)
        super()._leave(sequence)

    def _say(self, sequence: EngineSequence, count: int) -> None:
        """Append the next `count` ids of a turn; the first one, and the last, as every engine does."""
        say, said = self._says[sequence], sequence.num_noted
        is_last = said + count == say.length
        plain = count - (said == 0 or is_last)
        if plain:
            sequence.tokens.commit_all(Ids([say.token_id]) * plain, ONE_LOGPROB * plain, self.version)
            sequence.raw_logprobs.extend(ONE_LOGPROB * plain)
            sequence.kept_logmass.frombytes(bytes(plain * sequence.kept_logmass.itemsize))
            sequence.counts[say.token_id] += plain
            sequence.num_noted += plain
            self._totals.sampled += plain
        if plain < count:
            self._append(sequence, Drawn(say.end_id if is_last else say.token_id, LOGPROB, LOGPROB, 0.0))

    def _leap(self, until: float) -> list[EngineSequence] | None:
        """Those steps that only add an id to each sequence that runs, and begin before `until`, but one at least: up to the
        first that ends a turn. None if the next one is not of that kind."""
        decoding = self._roster.sequences
        loading = [one for one in self.running if one not in decoding] if len(decoding) < len(self.running) else []
        finished, steps = list[EngineSequence](), 0
        while not finished and (not steps or self._now() < until) and self._goes_on(loading):
            self._grow_crew()
            self._start_copies(self.waiting.is_refused)
            count = self._run_alike(until)
            finished = self._decode(count)
            steps += count
        for sequence in finished:
            self._leave(sequence)
        return finished if steps else None

    def _goes_on(self, loading: Sequence[EngineSequence]) -> bool:
        """What a step looks at before its rows: copies that ended, the line, pages. False if it has to do more about it."""
        if self.cache.tier.is_copying:
            self._send_back(self.cache.poll())
        if self.update or not self._roster.sequences or not all(sequence.lease.job for sequence in loading):
            return False
        return not self._hears_line() and len(self._roster.growing) <= self.cache.pool.num_available

    def _run_alike(self, until: float) -> int:
        """Spend the time of a step of the crew, and of those after it that find everything as it is: how many there were."""
        rows, keys, now = len(self._roster.sequences), self._roster.computed, self._now
        most = self._roster.num_alike if self.cache.is_still(self.waiting.is_refused) else 1
        count = 0
        while count < most and (not count or not (now() >= until or self._hears_line())):
            started = now()
            now.spent += self._roofline.seconds_of(rows, keys + rows, keys + rows)
            self._step_seconds = now() - started
            self.cache.costs.note_work(rows, 0.0, keys, self._step_seconds)
            keys += rows
            count += 1
        self._totals.steps += count
        return count


class SimulatedEngine(EngineService):
    """`EngineService` in virtual time: its steps run in a task of the event loop."""

    def __init__(self, core: SimulatedCore, info: EngineInfo, now: Ahead) -> None:
        super().__init__(core, info)
        self.core: SimulatedCore = core
        self._now = now
        self._posted = anyio.Event()

    def post(self, command: Command) -> None:
        """Have `command` run before the next step."""
        self._commands.append(command)
        self._posted.set()

    async def __aenter__(self) -> Self:
        self._open()
        self._steps = await anyio.create_task_group().__aenter__()
        self._steps.start_soon(self._step)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = "closed"
        self._posted.set()
        await self._steps.__aexit__(None, None, None)
        self.core.stop()
        if error is None:
            self._raise_crash()

    async def _step(self) -> None:
        """Step after step, as the step thread does; a bug ends every request with `EngineFailure`."""
        is_alone = False
        """It woke from its own sleep. Woken with others it would not be told that they are still to act."""
        try:
            while True:
                self._now.look()
                while self._commands:
                    self._commands.popleft()()
                if self._state == "closed":
                    break
                if self.core.is_idle:
                    self._posted = anyio.Event()
                    await self._posted.wait()
                    is_alone = False
                    continue
                finished = self.core.step()
                ends, spent = self._now(), self._now.take()
                if is_alone and ends < self.core.until:
                    clock.jump(spent)
                else:
                    if is_alone:  # the loop would come to it by itself, after a look around
                        clock.jump(self.core.idle_seconds)
                    await clock.sleep_until(ends)
                    is_alone = spent > 0
                self._finish(finished)
            self._abort_all()
        except Exception as error:  # a bug, of whatever kind: every request is told, and nobody waits for ever
            self._crash = error
            self._finish(list(self._waiting))

    def _finish(self, finished: Sequence[EngineSequence | Update]) -> None:
        self._finished.extend(finished)
        self._announce_finished()
