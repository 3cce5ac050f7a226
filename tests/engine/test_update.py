"""The policy changes while requests run: by mode, what they see, what is lost (nothing), and what fails half way."""

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from agentrt.core import seeds
from agentrt.core.errors import WeightsError
from agentrt.core.protocol import Completion, EngineInfo, UpdateMode
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.engine.batch import Batch
from agentrt.engine.sequence import Sequence as EngineSequence
from agentrt.engine.service import EngineService
from agentrt.engine.step import EngineCore
from agentrt.engine.update import Update
from agentrt.testing.toy import Logits, ToyRunner, hashed_logits

pytestmark = pytest.mark.anyio
VOCAB, PARAMS = 50, SamplingParams()
MODES: list[UpdateMode] = ["recompute", "keep", "drain", "abort_resume"]
OLD, NEW, NEWER = (hashed_logits(VOCAB, salt=salt) for salt in range(3))


class HeldRunner(ToyRunner):
    """A toy whose steps take real time, and which can be held in the middle of a step."""

    seconds = 0.0

    def __init__(self, logits: Logits, num_pages: int) -> None:
        super().__init__(logits, num_pages=num_pages, page_size=4)
        self.gates: dict[int, threading.Event] = {}
        """Steps, from 0 on, that wait in their middle until their gate is opened."""
        self.held_in = -1

    def run(self, batch: Batch) -> NDArray[np.float32]:
        if gate := self.gates.get(len(self.rows)):
            self.held_in = len(self.rows)
            assert gate.wait(60)
        time.sleep(self.seconds)
        return super().run(batch)


def make_core(logits: Logits, *, pages: int = 256, batch: int = 64, rows: int = 512) -> EngineCore:
    spec = EngineSpec(page_size=4, kv_tokens=4 * pages, max_batch=batch, step_tokens=rows)
    return EngineCore(HeldRunner(logits, pages), spec, vocab_size=VOCAB, bytes_of=lambda _: b"x")


@asynccontextmanager
async def service(
    logits: Logits = OLD, *, seconds: float = 0.0, keeps_kv: bool = False, pages: int = 256, batch: int = 64
) -> AsyncIterator[EngineService]:
    core = make_core(logits, pages=pages, batch=batch)
    runner_of(core).seconds, runner_of(core).keeps_kv = seconds, keeps_kv
    async with EngineService(
        core, EngineInfo(model="toy", model_hash="", vocab_size=VOCAB, context_length=200)
    ) as engine:
        yield engine
    core.check()
    assert core.cache.pool.num_free + core.cache.pool.num_evictable == core.cache.pool.num_pages


def runner_of(core: EngineCore) -> HeldRunner:
    assert isinstance(core.runner, HeldRunner)
    return core.runner


def sampled(
    logits: Logits, context: Sequence[int], seed: int, max_tokens: int, params: SamplingParams = PARAMS
) -> list[int]:
    """What a fresh engine samples after `context` in the first turn of a session: noise goes by seed and position."""
    core, tokens = make_core(logits), Tokens()
    tokens.observe(context)
    turn = seeds.derive(seed, "turn", 0)
    core.submit(EngineSequence(tokens=tokens, params=params, max_tokens=max_tokens, seed=turn), core.open())
    while not core.is_idle:
        core.step()
    return tokens.token_ids[len(context) :].tolist()


async def update_in(engine: EngineService, step: int, version: int, logits: Logits, mode: UpdateMode) -> None:
    """Ask for an update in the middle of a step, so that it is carried out right after it."""
    runner = runner_of(engine.core)
    await until(lambda: runner.held_in == step)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.update_weights, version, {"logits": logits}, mode)
        await until(lambda: bool(engine._commands))
        runner.gates[step].set()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await anyio.sleep(0.001)
    raise AssertionError("it does not come to that")


@pytest.mark.parametrize("mode", ["recompute", "abort_resume", "keep"])
async def test_c44_a_turn_keeps_its_budget_over_interruptions(mode: UpdateMode) -> None:
    """C44: prompt 10, budget 24, interrupted after 9 and after 15 ids: 24 in one turn, each by the policy of its time."""
    prompt = list(range(10))
    async with service(keeps_kv=mode == "keep") as engine:
        runner, done = runner_of(engine.core), list[Completion]()
        with engine.session(seed=5) as session:

            async def turn() -> None:
                done.append(await session.sample(prompt, PARAMS, max_tokens=24))

            runner.gates = {8: threading.Event(), 14: threading.Event()}
            async with anyio.create_task_group() as group:
                group.start_soon(turn)
                await update_in(engine, 8, 1, NEW, mode)
                await update_in(engine, 14, 2, NEWER, mode)
        assert len(runner.rows) == 24
    [one] = done
    ids = one.token_ids.tolist()
    assert one.versions.tolist() == [0] * 9 + [1] * 6 + [2] * 9
    assert one.finish_reason == "length"
    assert (one.context_tokens, one.oldest_kv) == (10, 0)
    assert ids[:9] == sampled(OLD, prompt, 5, 9)
    assert ids[9:15] == sampled(NEW, [*prompt, *ids[:9]], 5, 6)
    assert ids[15:] == sampled(NEWER, [*prompt, *ids[:15]], 5, 9)


async def test_c44_what_was_sampled_before_counts_as_output() -> None:
    """Penalties, min_tokens and stop strings see the turn as one."""
    params = SamplingParams(frequency_penalty=0.7, min_tokens=20, stop_token_ids=tuple(range(0, VOCAB, 2)))
    async with service() as engine:
        runner, done = runner_of(engine.core), list[Completion]()
        with engine.session(seed=5) as session:

            async def turn() -> None:
                done.append(await session.sample([1, 2, 3], params, max_tokens=60))

            runner.gates = {8: threading.Event()}
            async with anyio.create_task_group() as group:
                group.start_soon(turn)
                await update_in(engine, 8, 1, OLD, "recompute")
    assert set(done[0].versions) == {0, 1}
    assert done[0].token_ids.tolist() == sampled(OLD, [1, 2, 3], 5, 60, params)
    assert len(done[0].token_ids) >= 20


@pytest.mark.parametrize("mode", MODES)
async def test_c45_nothing_is_lost_when_weights_are_published(mode: UpdateMode) -> None:
    """C45: 16 decode, 4 come in the tick of the update, 4 while it is read, which takes long: 24 whole completions."""
    done: dict[int, Completion] = {}

    async def request(engine: EngineService, number: int) -> None:
        with engine.session(seed=number) as session:
            done[number] = await session.sample([number, 1, 2], PARAMS, max_tokens=24)

    async with service(seconds=0.003, keeps_kv=mode == "keep") as engine:
        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(request, engine, number)
            await until(lambda: engine.statistics().tokens_sampled >= 16 * 4)
            for number in range(16, 20):
                group.start_soon(request, engine, number)
            report = await engine.update_weights(1, {"logits": NEW}, mode)
            for number in range(20, 24):
                group.start_soon(request, engine, number)
        assert engine.statistics().version == 1
        assert (engine.statistics().running, engine.statistics().waiting) == (0, 0)
    assert sorted(done) == list(range(24))
    assert {one.finish_reason for one in done.values()} == {"length"}
    assert {len(one.token_ids) for one in done.values()} == {24}
    assert all(set(done[number].versions) == {1} for number in range(20, 24))
    assert report.requests <= 20
    for number in range(0, 16, 5):
        before = done[number].versions.count(0)
        assert before >= 4
        assert done[number].token_ids.tolist()[:before] == sampled(OLD, [number, 1, 2], number, 24)[:before]
        assert before == 24 or mode != "drain"


async def test_c45_requests_wait_while_an_update_drains() -> None:
    async with service(seconds=0.003) as engine:
        order: list[str] = []

        async def request(name: str, max_tokens: int) -> set[int]:
            with engine.session() as session:
                versions = set((await session.sample([1], PARAMS, max_tokens=max_tokens)).versions)
            order.append(f"{name} {versions}")
            return versions

        async def update() -> None:
            await engine.update_weights(1, {"logits": NEW}, "drain")
            order.append("update")

        async with anyio.create_task_group() as group:
            group.start_soon(request, "before", 30)
            await until(lambda: engine.statistics().running > 0)
            group.start_soon(update)
            await until(lambda: engine.core.update is not None)
            group.start_soon(request, "while", 2)
        # Who is woken first is the loop's choice, and all three may have ended when it looks; what each was sampled by is not.
        assert sorted(order) == ["before {0}", "update", "while {1}"]


@pytest.mark.parametrize("mode", MODES)
async def test_c46_old_kv_is_never_matched_by_a_new_request(mode: UpdateMode) -> None:
    """C46; rows 1 to 4 of the bug table. The toy fails if a row sees KV that other weights made."""
    prompt = [token % VOCAB for token in range(64)]
    async with service() as engine:
        for cached in (0, 60):
            with engine.session(seed=1) as session:
                assert (await session.sample(prompt, PARAMS, max_tokens=4)).cached_tokens == cached
        await engine.update_weights(1, {"logits": NEW}, mode)
        with engine.session(seed=1) as session:
            after = await session.sample(prompt, PARAMS, max_tokens=8)
        assert after.cached_tokens == 0
        assert after.oldest_kv == 1
        assert after.token_ids.tolist() == sampled(NEW, prompt, 1, 8)
        with engine.session(seed=1) as session:
            assert (await session.sample(prompt, PARAMS, max_tokens=4)).cached_tokens == 60


@pytest.mark.parametrize("mode", ["recompute", "drain", "abort_resume"])
async def test_c46_a_conversation_between_two_turns_is_computed_again(mode: UpdateMode) -> None:
    async with service() as engine:
        with engine.session(seed=1) as session:
            first = await session.sample(list(range(20)), PARAMS, max_tokens=8)
            session.pause("tool")
            await engine.update_weights(1, {"logits": NEW}, mode)
            ids = [*session.tokens.token_ids, 7]
            second = await session.sample([7], PARAMS, max_tokens=8)
            child = session.fork()
            with child:
                third = await child.sample([9], PARAMS, max_tokens=2)
        assert (first.oldest_kv, second.oldest_kv) == (0, 1)
        assert second.cached_tokens == 0
        assert third.cached_tokens >= 28
        async with service(NEW) as fresh:
            with fresh.session(seed=1) as again:
                again._turns = 1
                assert (await again.sample(ids, PARAMS, max_tokens=8)).token_ids == second.token_ids


async def test_c46_a_switch_keeps_the_kv_of_open_conversations_and_of_nobody_else() -> None:
    async with service(keeps_kv=True) as engine:
        with engine.session(seed=1) as session:
            await session.sample(list(range(20)), PARAMS, max_tokens=8)
            await engine.update_weights(1, {"logits": NEW}, "keep")
            second = await session.sample([7], PARAMS, max_tokens=8)
            assert second.cached_tokens == 27
            assert second.oldest_kv == 0
            assert set(second.versions) == {1}
            with session.fork() as child:
                third = await child.sample([9], PARAMS, max_tokens=2)
            assert third.cached_tokens == 36
            assert third.oldest_kv == 0
            with engine.session(seed=1) as stranger:
                new = await stranger.sample(list(range(20)), PARAMS, max_tokens=2)
            assert (new.cached_tokens, new.oldest_kv) == (0, 1)


@pytest.mark.parametrize("mode", ["recompute", "drain", "abort_resume"])
@pytest.mark.parametrize("is_preempted", [False, True])
async def test_the_logprobs_of_a_score_are_of_one_policy(mode: UpdateMode, is_preempted: bool) -> None:
    params = SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2)

    def scoring(logits: Logits) -> tuple[EngineCore, EngineSequence]:
        core, tokens = make_core(logits, batch=8, rows=8), Tokens()
        tokens.observe([index % 9 for index in range(40)])
        sequence = EngineSequence(tokens=tokens, params=params, num_scored=30)
        core.submit(sequence, core.open())
        return core, sequence

    def drain(core: EngineCore) -> None:
        while not core.is_idle:
            core.step()

    core, scored = scoring(OLD)
    while len(scored.scores) < 12:
        core.step()
    if is_preempted:
        core._return(scored)
    core.begin_update(Update(version=1, mode=mode, install=core.stage({"logits": NEW})))
    drain(core)
    other, expected = scoring(OLD if mode == "drain" else NEW)
    drain(other)
    assert scored.scores == expected.scores
    assert len(scored.scores) == 30


@pytest.mark.parametrize("mode", MODES)
async def test_a_failure_leaves_the_old_version_serving(mode: UpdateMode) -> None:
    """Row 43: a version is not seen before its weights are there."""

    def broken() -> None:
        raise MemoryError("half way")

    async with service() as engine:
        with pytest.raises(WeightsError, match="logits is missing"):
            await engine.update_weights(1, {"other": NEW}, mode)
        real = engine.core.runner.stage
        engine.core.runner.stage = lambda source: broken  # type: ignore[method-assign]
        with pytest.raises(WeightsError, match="half way"):
            await engine.update_weights(1, {"logits": NEW}, mode)
        engine.core.runner.stage = real  # type: ignore[method-assign]
        assert engine.statistics().version == 0
        with engine.session(seed=1) as session:
            one = await session.sample([1, 2], PARAMS, max_tokens=8)
        assert set(one.versions) == {0}
        assert one.token_ids.tolist() == sampled(OLD, [1, 2], 1, 8)
        await engine.update_weights(1, {"logits": NEW}, mode)
        with pytest.raises(WeightsError, match="version 1 is not above the present one, 1"):
            await engine.update_weights(1, {"logits": NEW}, mode)
        with pytest.raises(WeightsError, match="version 2147483648 is above 2147483647, the greatest that a token"):
            await engine.update_weights(2**31, {"logits": NEW}, mode)
        await engine.update_weights(2**31 - 1, {"logits": NEW}, mode)
        with engine.session() as session:
            assert (await session.sample([1], PARAMS, max_tokens=1)).versions.tolist() == [2**31 - 1]


async def test_an_update_that_drains_can_be_given_up() -> None:
    async with service(seconds=0.003) as engine:
        done = []

        async def request(max_tokens: int) -> None:
            with engine.session() as session:
                done.append((await session.sample([1], PARAMS, max_tokens=max_tokens)).versions.tolist())

        async with anyio.create_task_group() as group:
            group.start_soon(request, 60)
            await until(lambda: engine.statistics().running > 0)
            with anyio.move_on_after(0.03):
                group.start_soon(request, 3)
                await engine.update_weights(1, {"logits": NEW}, "drain")
        assert sorted(map(len, done)) == [3, 60]
        assert engine.statistics().version == 0
        await engine.update_weights(1, {"logits": NEW}, "drain")
        assert engine.statistics().version == 1


async def test_aborts_while_an_update_drains_lose_nothing() -> None:
    """Row 27: what is aborted in a pause, running or held back, gives its pages back."""
    async with service(seconds=0.003) as engine, anyio.create_task_group() as group:

        async def request() -> None:
            with engine.session() as session:
                await session.sample([1, 2, 3, 4, 5], PARAMS, max_tokens=190)

        group.start_soon(request)
        await until(lambda: engine.statistics().running > 0)
        async with anyio.create_task_group() as updating:
            updating.start_soon(engine.update_weights, 1, {"logits": NEW}, "drain")
            await until(lambda: engine.core.update is not None)
            group.start_soon(request)
            await anyio.sleep(0.02)
            group.cancel_scope.cancel()
    assert engine.core.held == []


@pytest.mark.parametrize("mode", MODES)
async def test_a_thousand_updates_under_load_leak_nothing(mode: UpdateMode) -> None:
    updates = 125  # in each mode and loop
    async with service(pages=96, keeps_kv=True, batch=8) as engine:
        done = []

        async def converse(seed: int) -> None:
            while engine.statistics().version < updates:
                with engine.session(seed=seed) as session:
                    for _ in range(2):
                        done.append(await session.sample([seed, 1, 2, 3, 4], PARAMS, max_tokens=6))
                    with session.fork() as child:
                        done.append(await child.sample([5], PARAMS, max_tokens=3))

        async with anyio.create_task_group() as group:
            for seed in range(4):
                group.start_soon(converse, seed)
            for version in range(1, updates + 1):
                await engine.update_weights(version, {"logits": (OLD, NEW)[version % 2]}, mode)
        assert {one.finish_reason for one in done} == {"length"}
        assert all(one.versions.tolist() == sorted(one.versions) for one in done)
        assert engine.statistics().version == updates
        assert engine.statistics().sessions == 0
