"""The async door: sessions that own their ids, cancellation, forks, crashes; on both event loops, in real threads."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from agentrt.core import seeds
from agentrt.core.errors import EngineFailure, RequestError
from agentrt.core.protocol import Completion, EngineInfo, SessionHints
from agentrt.core.samples import sample_n
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.engine.batch import Batch
from agentrt.engine.service import EngineService
from agentrt.engine.step import EngineCore
from agentrt.testing.toy import ToyRunner, hashed_logits

pytestmark = pytest.mark.anyio
VOCAB, PARAMS = 50, SamplingParams()


class SlowRunner(ToyRunner):
    """A toy whose steps take real time, or fail when they are told to."""

    seconds = 0.0
    fails = False

    def run(self, batch: Batch) -> NDArray[np.float32]:
        if self.fails:
            raise ZeroDivisionError("a bug in the runner")
        time.sleep(self.seconds)
        return super().run(batch)


@asynccontextmanager
async def service(*, pages: int = 64, seconds: float = 0.0, rows: int = 512) -> AsyncIterator[EngineService]:
    runner = SlowRunner(hashed_logits(VOCAB), num_pages=pages, page_size=4)
    runner.seconds = seconds
    spec = EngineSpec(page_size=4, kv_tokens=4 * pages, step_tokens=rows, max_batch=min(rows, 64))
    core = EngineCore(runner, spec, vocab_size=VOCAB, bytes_of=lambda token_id: b"x")
    info = EngineInfo(model="toy", model_hash="", vocab_size=VOCAB, context_length=200)
    async with EngineService(core, info) as engine:
        yield engine
    core.check()


async def test_a_session_keeps_every_id_and_computes_only_what_is_new() -> None:
    async with service() as engine:
        with engine.session(seed=3) as session:
            first = await session.sample([1, 2, 3], PARAMS, max_tokens=10)
            second = await session.sample([4, 5], SamplingParams(temperature=0.5), max_tokens=10)
        ids = session.tokens.token_ids.tolist()
        assert ids == [1, 2, 3, *first.token_ids, 4, 5, *second.token_ids]
        assert session.tokens.mask.tolist() == [0] * 3 + [1] * 10 + [0] * 2 + [1] * 10
        assert session.tokens.versions.tolist() == [-1] * 3 + [0] * 10 + [-1] * 2 + [0] * 10
        assert (first.cached_tokens, second.cached_tokens, second.context_tokens) == (0, 12, 15)
        assert first.seed == seeds.derive(3, "turn", 0)
        assert second.seed == seeds.derive(3, "turn", 1)
        with engine.session(seed=3) as again:
            assert (await again.sample([1, 2, 3], PARAMS, max_tokens=10)).token_ids == first.token_ids


async def test_many_sessions_at_once_give_what_each_gives_alone() -> None:
    async def alone(engine: EngineService, seed: int, into: dict[int, list[int]]) -> None:
        with engine.session(seed=seed) as session:
            for turn in range(3):
                await session.sample([turn, seed % VOCAB], PARAMS, max_tokens=8)
            into[seed] = session.tokens.token_ids.tolist()

    together: dict[int, list[int]] = {}
    single: dict[int, list[int]] = {}
    async with service(pages=24) as engine:
        async with anyio.create_task_group() as group:
            for seed in range(20):
                group.start_soon(alone, engine, seed, together)
        for seed in range(20):
            await alone(engine, seed, single)
        assert engine.statistics().sessions == 0
    assert together == single


async def test_cancelling_a_turn_keeps_what_was_sampled_and_frees_the_rest() -> None:
    async with service(seconds=0.01) as engine:
        with engine.session(seed=1) as session:
            with anyio.move_on_after(0.15):
                await session.sample([1, 2], PARAMS, max_tokens=150)
            sampled = session.tokens.num_sampled
            assert 0 < sampled < 150
            assert len(session.tokens) == 2 + sampled
            statistics = engine.statistics()
            assert (statistics.running, statistics.waiting) == (0, 0)
            after = await session.sample([7], PARAMS, max_tokens=3)
            assert after.context_tokens == 3 + sampled
        with engine.session(seed=1) as whole:
            await whole.sample([1, 2], PARAMS, max_tokens=sampled)
        assert whole.tokens.token_ids == session.tokens.token_ids[: 2 + sampled]


async def test_forks_with_equal_context_differ_and_leave_the_parent_alone() -> None:
    async with service() as engine:
        with engine.session(seed=1) as parent:
            await parent.sample([1, 2], PARAMS, max_tokens=8)
            before = parent.tokens.token_ids.tolist()
            with parent.fork() as one, parent.fork() as two:
                first = await one.sample([9], PARAMS, max_tokens=8)
                second = await two.sample([9], PARAMS, max_tokens=8)
            assert first.cached_tokens == second.cached_tokens == len(before) - 1
            assert first.token_ids != second.token_ids
            assert parent.tokens.token_ids.tolist() == before


async def test_a_fork_that_samples_at_once_shares_only_what_was_there() -> None:
    async with service() as engine:
        with engine.session(seed=1) as parent:
            await parent.sample([1, 2], PARAMS, max_tokens=8)
            child = parent.fork()
            await parent.sample([3], PARAMS, max_tokens=8)
            with child:
                forked = await child.sample([4, 4, 4, 4, 4], PARAMS, max_tokens=6)
        with engine.session(seed=1, salt="apart") as fresh:
            fresh.tokens.observe(child.tokens.token_ids[:10])
            fresh._turns, fresh._seed = 0, child.seed
            expected = await fresh.sample([4, 4, 4, 4, 4], PARAMS, max_tokens=6)
    assert forked.token_ids == expected.token_ids
    assert forked.logprobs == expected.logprobs


@pytest.mark.parametrize(
    ("observed", "params", "max_tokens", "words"),
    [
        ([], PARAMS, 4, "observed_ids is empty"),
        ([1, 50], PARAMS, 4, "observed_ids holds 50, and this model's ids are 0 to 49"),
        ([-1], PARAMS, 4, "observed_ids holds -1"),
        ([1], PARAMS, 0, "max_tokens is 0"),
        ([1], SamplingParams(min_tokens=5), 4, r"sampling.min_tokens \(5\) is above max_tokens \(4\)"),
        ([1], SamplingParams(logit_bias={77: 1.0}), 4, "sampling.logit_bias names id 77"),
        ([1] * 190, PARAMS, 20, r"context \(190 ids\) and max_tokens \(20\) exceed the model's context of 200"),
        ([1] * 30, PARAMS, 20, r"exceed engine.kv_tokens \(40\)"),
    ],
)
async def test_a_request_that_can_never_be_served_is_refused_and_changes_nothing(
    observed: Sequence[int], params: SamplingParams, max_tokens: int, words: str
) -> None:
    async with service(pages=10) as engine:
        with engine.session() as session:
            with pytest.raises(RequestError, match=words):
                await session.sample(observed, params, max_tokens=max_tokens)
            assert len(session.tokens) == 0


async def test_a_bug_in_a_step_ends_every_request_and_is_raised_at_the_end() -> None:
    async def sample(engine: EngineService) -> None:
        with engine.session() as session, pytest.raises(EngineFailure, match="a bug in the runner"):
            await session.sample([1], PARAMS, max_tokens=100)

    async def break_it() -> None:
        async with service(seconds=0.002) as engine:
            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(sample, engine)
                await anyio.sleep(0.02)
                engine.core.runner.fails = True  # type: ignore[attr-defined]
            await sample(engine)

    with pytest.raises(EngineFailure) as raised:
        await break_it()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


async def test_leaving_the_engine_aborts_what_is_in_flight() -> None:
    """One that has not begun yet has waited until then, and computed for no time."""
    ended: list[Completion] = []

    async def sample(engine: EngineService) -> None:
        with engine.session() as session:
            ended.append(await session.sample([1] * 40, PARAMS, max_tokens=150))

    async with anyio.create_task_group() as group, service(pages=48, seconds=0.01) as engine:
        for _ in range(2):
            group.start_soon(sample, engine)
        await anyio.sleep(0.05)
    assert [one.finish_reason for one in ended] == ["abort", "abort"]
    begun, waited = sorted(ended, key=lambda one: -len(one.token_ids))
    assert begun.token_ids
    assert 0 <= begun.queue_seconds < waited.queue_seconds < 60
    assert (waited.prefill_seconds, waited.decode_seconds, len(waited.token_ids)) == (0, 0, 0)


async def test_an_engine_that_is_left_by_cancellation_closes_its_sockets() -> None:
    with anyio.CancelScope() as scope:
        async with service() as engine:
            scope.cancel()
            await anyio.sleep_forever()
    assert not engine._thread.is_alive()
    assert engine._wake_in.fileno() == engine._wake_out.fileno() == -1


async def test_an_engine_that_is_not_open_says_so_and_nobody_waits() -> None:
    async with service() as engine:
        unentered = EngineService(engine.core, engine.info)
        with (
            unentered.session() as session,
            pytest.raises(EngineFailure, match="the engine is not entered: it answers"),
        ):
            await session.sample([1], PARAMS, max_tokens=2)
        late = engine.session()
        late.__enter__()
        await late.sample([1], PARAMS, max_tokens=2)
    for asked in (late.sample([2], PARAMS, max_tokens=2), late.score([2], [3], PARAMS), engine.update_weights(1, {})):
        with pytest.raises(EngineFailure, match="the engine is closed: it answers inside its `async with`"):
            await asked
    assert len(late.tokens) == 3, "nothing is appended"
    late.__exit__(None, None, None)
    with pytest.raises(AssertionError, match="an engine is entered once"):
        await engine.__aenter__()


async def test_requests_that_come_while_the_engine_closes() -> None:
    """Those in flight are aborted, and later ones fail; the engine itself ends as if there were none."""
    failures = []

    async def talk(engine: EngineService) -> None:
        while not failures:
            with engine.session() as session:
                try:
                    await session.sample([1, 2], PARAMS, max_tokens=2)
                except EngineFailure as failure:
                    failures.append(str(failure))

    async with anyio.create_task_group() as group, service() as engine:
        for _ in range(20):
            group.start_soon(talk, engine)
        await anyio.sleep(0.02)
    assert set(failures) == {"the engine is closed: it answers inside its `async with`"}


async def test_what_a_session_is_told_outside_its_scope_is_kept_or_ignored() -> None:
    async with service() as engine:
        session = engine.session(seed=1)
        session.hint(SessionHints(group="g"))
        session.progress(1.0)
        session.resume()
        early = session.fork()
        with session:
            await session.sample([1, 2], PARAMS, max_tokens=2)
            assert session.lease.hints.group == "g"
        session.hint(SessionHints())
        session.progress(1.0)
        session.resume()
        with early, session.fork() as late:
            await early.sample([1], PARAMS, max_tokens=2)
            assert (await late.sample([1], PARAMS, max_tokens=2)).context_tokens == 5


async def test_a_call_too_many_is_the_bug_of_its_caller_alone() -> None:
    async with service(seconds=0.005) as engine, anyio.create_task_group() as group:
        session = engine.session(seed=1)
        session.__enter__()
        group.start_soon(lambda: session.sample([1], PARAMS, max_tokens=150))
        await anyio.sleep(0.05)
        for call in (session.sample([2], PARAMS, max_tokens=1), session.score([2], [3], PARAMS)):
            with pytest.raises(AssertionError, match="a session's request is still in flight"):
                await call
        with pytest.raises(AssertionError, match="a session's request is still in flight"):
            session.pause("tool")
        session.__exit__(None, None, None)  # ends its request
        with engine.session() as other:
            await other.sample([1], PARAMS, max_tokens=2)
    assert 0 < session.tokens.num_sampled < 150


async def test_a_fork_of_what_ended_before_an_update_sees_the_new_weights_only() -> None:
    """The toy's rows find KV of old weights, if a lease has any."""
    async with service() as engine:
        with engine.session(seed=1) as parent:
            await parent.sample([1, 2, 3, 4, 5, 6, 7, 8], PARAMS, max_tokens=2)
            child = parent.fork()
        await engine.update_weights(1, {"logits": hashed_logits(VOCAB, salt=1)})  # type: ignore[dict-item]
        with child:
            completion = await child.sample([1], PARAMS, max_tokens=2)
    assert (completion.context_tokens, completion.cached_tokens, completion.oldest_kv) == (11, 0, 1)


@pytest.mark.parametrize("rows", [1, 7, 16, 512])
@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3),
        SamplingParams(min_tokens=2, stop_token_ids=(7,)),
    ],
)
async def test_scoring_gives_what_sampling_recorded(params: SamplingParams, rows: int) -> None:
    """Rows 14 and 16 of the bug table: the same law, temperature included, whatever the size of the chunks."""
    async with service(rows=rows) as engine:
        prompt = list(range(20))
        with engine.session(seed=1) as session:
            sampled = await session.sample(prompt, params, max_tokens=12)
        for salt in ("", "apart"):
            with engine.session(salt=salt) as again:
                scores = await again.score(prompt, sampled.token_ids, params)
                assert scores.tolist() == pytest.approx(sampled.logprobs.tolist(), abs=1e-6)
                more = await again.sample([3], params, max_tokens=2)
                assert more.cached_tokens == 31


async def test_scoring_to_the_very_end_of_the_context() -> None:
    async with service() as engine:
        most = engine.bounds.context_length
        with engine.session(seed=1) as session:
            sampled = await session.sample([1] * (most - 4), PARAMS, max_tokens=4)
        with engine.session(salt="apart") as again:
            assert await again.score([1] * (most - 4), sampled.token_ids, PARAMS) == sampled.logprobs
        with (
            engine.session() as other,
            pytest.raises(RequestError, match="scored_ids holds 10000, and this model's ids"),
        ):
            await other.score([1], [10_000], PARAMS)
        with engine.session() as other, pytest.raises(RequestError, match="scored_ids is empty"):
            await other.score([1], [], PARAMS)


async def test_raw_logprobs_and_the_kept_mass_join_to_the_tempered_law() -> None:
    async with service() as engine:
        with engine.session(seed=1) as session:
            one = await session.sample([1, 2], SamplingParams(top_k=3), max_tokens=12)
        whole = [logprob + mass for logprob, mass in zip(one.logprobs, one.kept_logmass, strict=True)]
        assert whole == pytest.approx(one.raw_logprobs.tolist(), abs=1e-6)
        assert min(one.kept_logmass) < 0
        with engine.session(seed=1) as session:
            one = await session.sample([1, 2], PARAMS, max_tokens=12)
        assert one.raw_logprobs == one.logprobs


async def test_progress_is_told_while_a_turn_is_sampled() -> None:
    seen: list[int] = []
    async with service(seconds=0.005) as engine:
        with engine.session(seed=1) as session:
            await session.sample([1, 2], PARAMS, max_tokens=12, progress=lambda: seen.append(len(session.tokens)))
    assert seen == sorted(seen)
    assert len(set(seen)) > 3, "it was told once, at the end"


async def test_what_progress_raises_is_its_callers_error_alone() -> None:
    """It ended the engine's task group, and with it everybody's turns."""

    def fail() -> None:
        raise LookupError("a display that is gone")

    ended = []
    async with service(seconds=0.005) as engine:

        async def other() -> None:
            with engine.session() as session:
                ended.append(await session.sample([3], PARAMS, max_tokens=40))

        async with anyio.create_task_group() as others:
            others.start_soon(other)
            with engine.session() as session:
                with pytest.raises(LookupError, match="a display that is gone"):
                    await session.sample([1, 2], PARAMS, max_tokens=100, progress=fail)
                assert len(session.tokens) < 60, "the turn was not ended"
                await session.sample([1], PARAMS, max_tokens=2)
        assert engine.statistics().running == 0
    assert len(ended[0].token_ids) == 40


async def test_a_step_that_never_ends_is_told_to_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """They waited for ever: the engine closed without a word."""
    monkeypatch.setattr("agentrt.engine.service.ABORT_SECONDS", 0.1)
    errors = list[str]()

    async def wait(engine: EngineService) -> None:
        with engine.session() as session:
            try:
                await session.sample([1, 2], PARAMS, max_tokens=100)
            except EngineFailure as error:
                errors.append(str(error))

    async with anyio.create_task_group() as waiting:
        try:
            async with service(seconds=1.0) as engine:
                waiting.start_soon(wait, engine)
                await anyio.sleep(0.1)
                started = anyio.current_time()
        except EngineFailure as error:
            errors.append(str(error))
    assert errors == ["the engine stopped: TimeoutError('a step had not ended after 0.1 s')"] * 2
    assert anyio.current_time() - started < 0.8
    await anyio.to_thread.run_sync(engine._thread.join)


PROMPT = [index % VOCAB for index in range(41)]


def outcome(completion: Completion) -> tuple[object, ...]:
    return completion.token_ids, completion.logprobs, completion.seed, completion.context_tokens


async def test_c29_requests_without_a_seed_differ_and_say_theirs() -> None:
    """C29, C: three of them; each says the seed that it had, which gives the same again."""
    async with service() as engine:
        found = {}
        for _ in range(3):
            with engine.session() as session:
                completion = await session.sample([1, 2], PARAMS, max_tokens=32)
                assert completion.seed == seeds.derive(session.seed, "turn", 0)
                found[session.seed] = completion.token_ids.tolist()
        assert len({tuple(ids) for ids in found.values()}) == 3
        for seed, ids in found.items():
            with engine.session(seed=seed) as session:
                assert (await session.sample([1, 2], PARAMS, max_tokens=32)).token_ids.tolist() == ids


@pytest.mark.parametrize("held", [0, 5])
@pytest.mark.parametrize("observed", [PROMPT, PROMPT[:1]])
async def test_c29_n_samples_are_those_of_n_forks(held: int, observed: list[int]) -> None:
    """C29, B, and row 35: they differ from one another, and the same seed gives the same samples again."""
    async with service() as engine:
        with engine.session(seed=7) as one, engine.session(seed=7, salt="apart") as two:
            for session in (one, two):
                if held:
                    await session.sample([1], PARAMS, max_tokens=held)
            samples = await sample_n(one, observed, PARAMS, n=3, max_tokens=9)
            with two.fork() as trunk, trunk.fork() as first, trunk.fork() as second, trunk.fork() as third:
                forks = [await fork.sample(observed, PARAMS, max_tokens=9) for fork in (first, second, third)]
            assert len(one.tokens) == len(two.tokens)
        assert [outcome(sample) for sample in samples] == [outcome(fork) for fork in forks]
        assert len({tuple(sample.token_ids) for sample in samples}) == 3
        assert engine.statistics().sessions == 0


async def test_the_prompt_of_n_samples_is_computed_once() -> None:
    async with service() as engine:
        with engine.session(seed=7) as session:
            samples = await sample_n(session, PROMPT, PARAMS, n=4, max_tokens=6)
        assert [sample.cached_tokens for sample in samples] == [40] * 4
        assert engine.statistics().tokens_prefilled == 40 + 4


async def test_a_refused_sample_is_one_error() -> None:
    async with service() as engine:
        with engine.session() as session:
            with pytest.raises(RequestError, match="names id 77"):
                await sample_n(session, PROMPT, SamplingParams(logit_bias={77: 1.0}), n=3, max_tokens=6)
            assert len(session.tokens) == 0


async def test_cancellation_ends_all_samples() -> None:
    async with service(seconds=0.01) as engine:
        with engine.session() as session, anyio.move_on_after(0.2) as scope:
            await sample_n(session, PROMPT, PARAMS, n=3, max_tokens=150)
        assert scope.cancelled_caught
        statistics = engine.statistics()
        assert (statistics.running, statistics.waiting, statistics.sessions) == (0, 0, 0)
