"""One cell of a comparison: a whole run in virtual time, and what came of it."""

import time
from collections import defaultdict
from collections.abc import Sequence

import anyio

from agentrt.core import clock
from agentrt.core.errors import UsageError
from agentrt.core.protocol import EngineInfo
from agentrt.core.records import EpisodeRecord, GroupRecord
from agentrt.core.spec import EngineSpec, Limits, RunSpec
from agentrt.engine.simulate import DEVICES, SHAPES, Roofline, SimulatedCore, SimulatedEngine, VirtualRunner
from agentrt.rollout.dispatcher import dispatch
from agentrt.rollout.order import chosen_tasks
from agentrt.rollout.resume import Ledger
from agentrt.rollout.setup import Setup
from agentrt.sim.spec import CellResult, SimSpec
from agentrt.sim.traffic import VOCAB_SIZE, Policy, Renderer, TrafficEnvironment, TrafficRunner

FORETOLD = "infercept"
"""The policy that is given the durations of tools."""


def simulate(spec: SimSpec) -> CellResult:
    """Run one cell. `UsageError` without trio, whose mock clock it needs."""
    try:
        from trio.testing import MockClock
    except ImportError as error:
        raise UsageError("a simulation runs on trio's mock clock; install trio") from error
    options = {"clock": MockClock(autojump_threshold=0)}
    return anyio.run(_simulate, spec, backend="trio", backend_options=options)


async def _simulate(spec: SimSpec) -> CellResult:
    started = time.perf_counter()
    roofline = Roofline(DEVICES[spec.device], SHAPES[spec.model])
    pool = spec.pool_tokens or roofline.pool_tokens
    host = int(spec.host_share * pool)
    engine_spec = EngineSpec(
        page_size=spec.page_size, kv_tokens=pool, host_tokens=host,
        max_batch=spec.max_batch, step_tokens=spec.step_tokens, kv_policy=spec.policy, kv_ttl_seconds=spec.ttl_seconds,
    )  # fmt: skip
    runner = VirtualRunner(roofline, engine_spec, host, spec.link_gigabytes * 1e9)
    core = SimulatedCore(runner, engine_spec, Policy(spec.traffic), VOCAB_SIZE)
    info = EngineInfo(
        model=spec.model, model_hash="simulated", vocab_size=VOCAB_SIZE, context_length=spec.traffic.context_tokens
    )
    live = max(1, round(spec.phi * pool / spec.traffic.mean_context()))
    tally = Tally()
    async with SimulatedEngine(core, info, runner.now) as engine:
        setup = _setup(spec, engine, tally)
        tasks = await chosen_tasks(setup.environment, "train", -(-spec.episodes // spec.group_size), spec.seed)
        plans = Ledger().left(tasks, spec.group_size, as_group=False)
        await dispatch(setup, plans, tally, tally, max_concurrent=live)
        seconds = clock.now()
        counts = engine.statistics()
    core.check()
    return CellResult(
        policy=spec.policy, phi=spec.phi, live=live, episodes_per_hour=tally.episodes / seconds * 3600,
        turn_p50=quantile(tally.turns, 0.5), turn_p95=quantile(tally.turns, 0.95),
        group_p50=quantile(tally.groups, 0.5), group_p95=quantile(tally.groups, 0.95), episodes=tally.episodes,
        failed=tally.failed, turns=len(tally.turns), seconds=seconds, real_seconds=time.perf_counter() - started,
        tokens_sampled=counts.tokens_sampled, tokens_prefilled=counts.tokens_prefilled,
        tokens_reprefilled=counts.tokens_reprefilled, preemptions=counts.preemptions, steps=counts.steps,
        kv=dict(tally.kv),
    )  # fmt: skip


def _setup(spec: SimSpec, engine: SimulatedEngine, tally: "Tally") -> Setup:
    unlimited = Limits(
        max_turns=None, max_turn_tokens=spec.traffic.context_tokens // 8, max_idle_turns=None, wall_seconds=None,
        tool_seconds=spec.traffic.longest_seconds,
    )  # fmt: skip
    run_spec = RunSpec(environment="traffic", limits=unlimited, seed=spec.seed, group_size=spec.group_size)
    runner = TrafficRunner(foretells=spec.policy == FORETOLD)
    environment = TrafficEnvironment(spec.traffic, spec.seed, tally.turns.append)
    return Setup(environment=environment, engine=engine, renderer=Renderer(), spec=run_spec, sandboxes=lambda: runner)


class Tally:
    """`rollout.dispatcher.Sink` and `Observer` that count, and keep nothing else."""

    def __init__(self) -> None:
        self.turns: list[float] = []
        self.groups: list[float] = []
        self.episodes = self.failed = 0
        self.kv: defaultdict[str, float] = defaultdict(float)
        self._started: dict[str, float] = {}

    def write(self, record: EpisodeRecord) -> None:
        self.episodes += 1
        self.failed += record.status != "ok"
        for name, value in record.kv.items():
            if isinstance(value, int | float):
                self.kv[name] += value

    def write_group(self, group: GroupRecord) -> None:
        self.groups.append(clock.now() - self._started[group.task_id])

    def episode_started(self, task_id: str, member: int) -> None:
        self._started.setdefault(task_id, clock.now())

    def episode_ended(self, record: EpisodeRecord) -> None:
        """Counted when it was written."""

    def group_ended(self, group: GroupRecord) -> None:
        """Counted when it was written."""


def quantile(numbers: Sequence[float], share: float) -> float:
    """The smallest of `numbers` that this share of them do not pass; 0 if there are none."""
    return sorted(numbers)[min(int(share * len(numbers)), len(numbers) - 1)] if numbers else 0.0
