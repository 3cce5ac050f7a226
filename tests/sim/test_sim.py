"""Simulated runs: the roofline by hand, exact repeats, every policy on a pool that is far too small, in virtual time."""

import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

import anyio
import msgspec
import pytest
from anyio.abc import TaskGroup
from trio.testing import MockClock
from typer.testing import CliRunner

from agentrt.cli import app
from agentrt.core import clock
from agentrt.core.errors import UsageError
from agentrt.core.protocol import EngineInfo
from agentrt.core.spec import EngineSpec, KVPolicy, SamplingParams, convert
from agentrt.engine.roster import Roster
from agentrt.engine.simulate import DEVICES, SHAPES, Roofline, SimulatedCore, SimulatedEngine, VirtualRunner
from agentrt.engine.step import EngineCore
from agentrt.sim.cell import in_order, quantile, simulate
from agentrt.sim.spec import CellResult, SimSpec
from agentrt.sim.table import render
from agentrt.sim.traffic import VOCAB_SIZE, Policy, Traffic

EIGHT = Roofline(DEVICES["h200"], SHAPES["qwen3-8b"])
SHORT = Traffic(turns=(3.0, 0.3), sampled_tokens=(10.0, 0.5), result_tokens=(200.0, 0.5))
SMALL = SimSpec(episodes=24, group_size=4, traffic=SHORT, page_size=32, pool_tokens=10_240, phi=4.0)


def played(**changes: object) -> CellResult:
    return simulate(SMALL.with_(**changes))


def test_kv_of_the_models() -> None:
    assert {name: shape.token_bytes // 1024 for name, shape in SHAPES.items()} == {
        "qwen3-0.6b": 112, "qwen3-8b": 144, "qwen3-32b": 256
    }  # fmt: skip
    assert EIGHT.pool_tokens == 749_376


def test_a_decode_step_is_bound_by_reads() -> None:
    """16.4 GB of weights and 64 x 10,001 ids of KV at 3.84 TB/s, and a millisecond."""
    read = 16.4e9 + 64 * 10_001 * 147_456
    assert EIGHT.seconds([(10_000, 1)] * 64) == pytest.approx(0.001 + read / 3.84e12)


def test_a_prompt_is_bound_by_arithmetic() -> None:
    """2 x 8.2e9 a row and 589,824 a row and key, at 445 TFLOP/s: 39 microseconds a token at 4k."""
    flops = 16.4e9 * 4096 + 589_824 * 4096 * 4097 / 2
    assert EIGHT.seconds([(0, 4096)]) == pytest.approx(0.001 + flops / (0.45 * 989e12))
    assert EIGHT.seconds([(0, 4096)]) / 4096 == pytest.approx(39.8e-6, rel=0.01)


def test_a_prompt_beside_decodes_waits_for_their_attention() -> None:
    """The prompt's products are arithmetic, the attention of that step is reading; neither hides in the other."""
    products = 16.4e9 * (512 + 64) / (0.45 * 989e12)
    reads = 147_456 * (64 * 10_001 + 512) / 3.84e12
    assert EIGHT.seconds([(10_000, 1)] * 64 + [(0, 512)]) == pytest.approx(0.001 + products + reads)


@pytest.mark.parametrize("host_share", [0.0, 4.0])
@pytest.mark.parametrize("policy", get_args(KVPolicy))
def test_every_policy_plays_all_episodes(policy: KVPolicy, host_share: float) -> None:
    """With four times as many live episodes as fit. Every page is accounted for at the end of a cell."""
    cell = played(policy=policy, host_share=host_share)
    assert (cell.episodes, cell.failed) == (24, 0)
    assert cell.live == 18
    assert host_share or cell.tokens_reprefilled > 0, "without a host what was given up is computed again"


def test_the_same_spec_gives_the_same_result() -> None:
    one, other = (msgspec.structs.asdict(played(host_share=0.5, phi=8.0)) for _ in range(2))
    assert {**one, "real_seconds": 0.0} == {**other, "real_seconds": 0.0}


def test_tasks_that_wake_together_go_on_in_order() -> None:
    woken = list[int]()

    async def sleep(number: int) -> None:
        await anyio.sleep(1)
        woken.append(number)

    async def run() -> None:
        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(sleep, number)

    with in_order():
        anyio.run(run, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})
    assert woken == list(range(50))


def test_the_same_spec_gives_the_same_traffic_to_each_policy() -> None:
    cells = [played(policy=policy) for policy in ("lru", "priced")]
    assert cells[0].turns == cells[1].turns
    assert cells[0].tokens_sampled == cells[1].tokens_sampled


@pytest.mark.parametrize("changes", [{"policy": "priced"}, {"policy": "lru", "host_share": 0.5, "link_gigabytes": 1.0}])
def test_many_steps_done_together_are_the_same_steps(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    together = played(**changes)
    monkeypatch.setattr(SimulatedCore, "step", EngineCore.step)
    monkeypatch.setattr(Roster, "join", lambda *_: None)
    apart = played(**changes)
    for name in set(CellResult.__struct_fields__) - {"policy", "real_seconds"}:
        assert getattr(together, name) == pytest.approx(getattr(apart, name)), name


def test_lengths_are_those_asked_for() -> None:
    traffic = Traffic()
    tokens = sorted(traffic.turn_tokens(seed) for seed in range(2001))
    assert 90 < tokens[1000] < 110, "the median is 100"
    calls = [call for seed in range(300) for call in traffic.episode(seed).calls]
    quick = sum(call.seconds < 1.0 for call in calls) / len(calls)
    assert 0.81 < quick < 0.86, "86 % are quick, and of those 96 % take less than a second"


def left(use: Callable[[SimulatedEngine, TaskGroup], Awaitable[None]]) -> None:
    """Leave a simulated engine right after this use of it."""

    async def leave() -> None:
        spec = EngineSpec(kv_tokens=4096)
        runner = VirtualRunner(EIGHT, spec, 0, 1e9)
        core = SimulatedCore(runner, spec, Policy(SHORT), VOCAB_SIZE, clock.seconds_to_wake)
        info = EngineInfo(model="simulated", model_hash="", vocab_size=VOCAB_SIZE, context_length=2048)
        async with anyio.create_task_group() as group, SimulatedEngine(core, info, runner.now) as engine:
            await use(engine, group)
        core.check()

    anyio.run(leave, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})


def test_leaving_the_engine_aborts_what_is_in_flight() -> None:
    reasons: list[str] = []

    async def sample(engine: SimulatedEngine) -> None:
        with engine.session() as session:
            reasons.append((await session.sample([1], SamplingParams(), max_tokens=100)).finish_reason)

    async def use(engine: SimulatedEngine, group: TaskGroup) -> None:
        group.start_soon(sample, engine)
        await anyio.sleep(0.01)

    left(use)
    assert reasons == ["abort"]


def test_leaving_the_engine_right_after_a_session() -> None:
    """What was posted last wakes the engine, which is closed by then."""

    async def use(engine: SimulatedEngine, group: TaskGroup) -> None:
        await anyio.sleep(0.01)
        with engine.session():
            pass

    left(use)


def test_quantiles() -> None:
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 3.0
    assert quantile([], 0.5) == 0.0


def test_the_command_compares_policies(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        "pool_tokens = 10_240\ngroup_size = 4\n[traffic]\nturns = [2.0, 0.1]\nsampled_tokens = [5.0, 0.1]\n"
    )
    options = ["sim", str(spec), "--episodes", "8", "--policies", "lru,priced", "--phi", "1,2", "--json"]
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    cells = json.loads(result.stdout.splitlines()[-1])["cells"]
    assert [(cell["phi"], cell["policy"]) for cell in cells] == [
        (1.0, "lru"), (1.0, "priced"), (2.0, "lru"), (2.0, "priced")
    ]  # fmt: skip
    assert "priced" in result.stdout


def test_a_wrong_spec_is_one_sentence(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text("episode = 8\n")
    result = CliRunner().invoke(app, ["sim", str(spec)])
    assert "unknown key episode; did you mean 'episodes'?" in str(result.exception)


def test_an_unknown_policy_is_named() -> None:
    result = CliRunner().invoke(app, ["sim", "--policies", "fifo"])
    assert "there is no policy 'fifo'" in str(result.exception)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"phi": math.nan}, "phi must be above 0, not nan"),
        ({"link_gigabytes": math.inf}, "link_gigabytes must be above 0, not inf"),
        ({"host_share": math.nan}, "host_share must be 0 or more, not nan; 0 means no host"),
        ({"live": 0}, "live must be above 0, not 0"),
        ({"pool_tokens": -1}, "pool_tokens must be above 0, not -1"),
        ({"pool_tokens": 32}, r"pool_tokens \(32\) is less than one page of 64"),
        ({"step_tokens": 256}, r"step_tokens \(256\) is below max_batch \(512\)"),
        ({"ttl_seconds": -1.0}, "ttl_seconds must be 0 or more, not -1"),
        ({"traffic": {"turns": [0.0, 0.5]}}, "turns takes a median above 0 and a deviation of 0 or more, not 0.0, 0.5"),
        ({"traffic": {"result_tokens": [5.0, math.nan]}}, "result_tokens takes a median above 0 .*, not 5.0, nan"),
        ({"traffic": {"prompt_tokens": 0}}, "prompt_tokens must be above 0, not 0"),
        ({"traffic": {"prompt_tokens": 32_768}}, r"context_tokens \(32768\) must be above prompt_tokens, and 8"),
        ({"traffic": {"context_tokens": 8, "prompt_tokens": 1}}, r"context_tokens \(8\) must be above"),
        ({"traffic": {"quick_share": 1.5}}, r"quick_share must be in \[0, 1\], not 1.5"),
        ({"traffic": {"slow_seconds": -1.0}}, "slow_seconds must be 0 or more, not -1.0"),
        ({"traffic": {"slow_exponent": 0.0}}, "slow_exponent must be 0.1 or more, not 0.0"),
    ],
)
def test_what_cannot_be_is_no_simulation(spec: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=f"sim: .*{words}"):
        convert(spec, SimSpec, "sim")


@pytest.mark.parametrize("live", [1, 8])
def test_where_no_episode_comes_to_a_turn(live: int) -> None:
    """A pool for the prompt but not for a turn; all fail at once, and with that the engine is left at once."""
    with pytest.raises(UsageError, match=r"no episode came to a turn: context \(2000 ids\) and max_tokens \(4096\)"):
        played(pool_tokens=4096, live=live)


def test_some_failed_is_said_in_the_table() -> None:
    """A pool for the prompt and a turn, but not for what tools give."""
    cell = played(pool_tokens=6400, live=4)
    assert 0 < cell.failed <= cell.episodes
    assert next(render([cell]).columns[1].cells) == f"priced, {cell.failed} failed"
