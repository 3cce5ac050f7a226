"""One cell of a comparison: a whole run in virtual time, and what came of it."""

import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any

import anyio

from agentrt.core import clock
from agentrt.core.errors import UsageError
from agentrt.core.protocol import EngineInfo
from agentrt.core.records import EpisodeRecord, GroupRecord
from agentrt.core.spec import EngineSpec, Limits, RunSpec
from agentrt.engine.simulate import DEVICES, SHAPES, Roofline, SimulatedCore, SimulatedEngine, VirtualRunner
from agentrt.rollout.dispatcher import dispatch
from agentrt.rollout.setup import Setup
from agentrt.sim.load import Load, Played, TrafficLoad
from agentrt.sim.spec import CellResult, SimSpec
from agentrt.sim.traffic import VOCAB_SIZE, TrafficRunner

COLLECT_AFTER = 100_000
"""New objects."""
FORETOLD = "infercept"
"""The policy that is given the durations of tools."""


def simulate(spec: SimSpec, load: Load | None = None) -> CellResult:
    """Run one cell, over the traffic of the spec or over `load`. The same spec and load give the same result.

    `UsageError` without trio, whose mock clock it needs, and if no episode comes to a turn.
    """
    try:
        from trio.testing import MockClock
    except ImportError as error:
        raise UsageError("a simulation runs on trio's mock clock; install agentrt[sim]") from error
    options = {"clock": MockClock(autojump_threshold=0)}
    load = load or TrafficLoad(spec.traffic)
    with _seldom_collecting(), in_order():
        return anyio.run(_simulate, spec, load, backend="trio", backend_options=options)


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """The garbage collector looks at what was there before no more, and seldom at the rest: nearly all of it lives on."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class _InOrder(random.Random):
    """What trio shuffles the tasks with that wake together, sorted by when they were started; it takes the last one first."""

    def shuffle(self, x: MutableSequence[Any]) -> None:
        x.reverse()


@contextmanager
def in_order() -> Iterator[None]:
    """Tasks that wake together go on in the order in which they were started, where trio draws another one in every run.

    trio has these two names for hypothesis, which does the like, and no public ones. In a trio without them a run is as good,
    but another one each time.
    """
    from trio._core import _run

    scheduler, ours = vars(_run), {"_ALLOW_DETERMINISTIC_SCHEDULING": True, "_r": _InOrder()}
    before = {name: scheduler[name] for name in ours if name in scheduler}
    scheduler.update(ours)
    try:
        yield
    finally:
        scheduler.update(before)


async def _simulate(spec: SimSpec, load: Load) -> CellResult:
    started = time.perf_counter()
    roofline = Roofline(DEVICES[spec.device], SHAPES[spec.model])
    pool, mean_context = spec.pool_tokens or roofline.pool_tokens, load.mean_context()
    live = spec.live or max(1, round(spec.phi * pool / mean_context))
    engine_spec = _engine_spec(spec, pool, live * load.limits()[0])
    runner = VirtualRunner(roofline, engine_spec, int(engine_spec.host_tokens), spec.link_gigabytes * 1e9)
    core = SimulatedCore(runner, engine_spec, load.script(spec), VOCAB_SIZE, clock.seconds_to_wake)
    info = EngineInfo(model=spec.model, model_hash="simulated", vocab_size=VOCAB_SIZE, context_length=load.limits()[0])
    async with SimulatedEngine(core, info, runner.now) as engine:
        tally = Tally(lambda: engine.statistics().tokens_sampled)
        played = await load.play(spec, tally.turns.append)
        setup = _setup(spec, engine, played, load.limits())
        await dispatch(setup, played.plans, tally, tally, max_concurrent=live)
        if not tally.turns:
            raise UsageError(f"no episode came to a turn: {tally.failure}")
        seconds = clock.now()
        counts = engine.statistics()
    core.check()
    return CellResult(
        policy=spec.policy, phi=live * mean_context / pool if spec.live else spec.phi, live=live,
        episodes_per_hour=tally.episodes / seconds * 3600, full_ids_per_second=tally.full_ids_per_second,
        turn_p50=quantile(tally.turns, 0.5), turn_p95=quantile(tally.turns, 0.95),
        group_p50=quantile(tally.groups, 0.5), group_p95=quantile(tally.groups, 0.95), episodes=tally.episodes,
        failed=tally.failed, turns=len(tally.turns), seconds=seconds, real_seconds=time.perf_counter() - started,
        tokens_sampled=counts.tokens_sampled, tokens_prefilled=counts.tokens_prefilled,
        tokens_reprefilled=counts.tokens_reprefilled, preemptions=counts.preemptions, steps=counts.steps,
        kv=dict(tally.kv),
    )  # fmt: skip


def _engine_spec(spec: SimSpec, pool: int, most: int) -> EngineSpec:
    """The engine that is simulated; `most` ids are alive at one time at most."""
    host, policy = int(spec.host_share * pool), spec.policy
    if policy == "unlimited":
        pool, host, policy = 2 * max(pool, most), 0, "lru"
    return EngineSpec(
        page_size=spec.page_size, kv_tokens=pool, host_tokens=host, max_batch=spec.max_batch,
        step_tokens=spec.step_tokens, kv_policy=policy, kv_ttl_seconds=spec.ttl_seconds, order=spec.order,
    )  # fmt: skip


def _setup(spec: SimSpec, engine: SimulatedEngine, played: Played, most: tuple[int, int, float]) -> Setup:
    limits = Limits(
        max_turns=None, max_turn_tokens=most[1], max_idle_turns=None, max_tool_calls=None, max_episode_tokens=None,
        wall_seconds=None, tool_seconds=most[2],
    )  # fmt: skip
    run_spec = RunSpec(environment="simulated", limits=limits, seed=spec.seed, group_size=spec.group_size)
    runner = TrafficRunner(foretells=spec.policy == FORETOLD)
    return Setup(
        environment=played.environment, engine=engine, renderer=played.renderer, spec=run_spec, sandboxes=lambda: runner
    )


class Tally:
    """`rollout.dispatcher.Sink` and `Observer` that count, and keep nothing else."""

    def __init__(self, tokens_sampled: Callable[[], int]) -> None:
        self._tokens_sampled = tokens_sampled
        self._until, self._sampled = 0.0, 0
        """When the last episode began, and what was sampled by then."""
        self.turns: list[float] = []
        self.groups: list[float] = []
        self.episodes = self.failed = 0
        self.failure = ""
        """Of the last that failed."""
        self.kv: defaultdict[str, float] = defaultdict(float)
        self._started: dict[str, float] = {}

    def write(self, record: EpisodeRecord) -> None:
        self.episodes += 1
        if record.error is not None:
            self.failed, self.failure = self.failed + 1, record.error.message
        for name, value in record.kv.items():
            if isinstance(value, int | float):
                self.kv[name] += value

    def write_group(self, group: GroupRecord) -> None:
        self.groups.append(clock.now() - self._started[group.task_id])

    @property
    def full_ids_per_second(self) -> float:
        """See `CellResult`; 0 where all began at once."""
        return self._sampled / self._until if self._until else 0.0

    def run_started(self, groups: int, episodes: int) -> None:
        """Counted as they begin."""

    def episode_started(self, task_id: str, member: int) -> None:
        self._until, self._sampled = clock.now(), self._tokens_sampled()
        self._started.setdefault(task_id, clock.now())

    def episode_ended(self, record: EpisodeRecord) -> None:
        """Counted when it was written."""

    def group_ended(self, group: GroupRecord) -> None:
        """Counted when it was written."""


def quantile(numbers: Sequence[float], share: float) -> float:
    """The smallest of `numbers` that this share of them do not pass; 0 if there are none."""
    return sorted(numbers)[min(int(share * len(numbers)), len(numbers) - 1)] if numbers else 0.0
