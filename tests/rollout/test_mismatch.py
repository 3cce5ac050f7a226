"""Recorded logprobs against a computation from scratch: exact figures, every path, forks, versions, a logprob tampered with."""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from agentrt.core.errors import UsageError
from agentrt.core.protocol import Completion, EngineInfo, UpdateMode
from agentrt.core.records import BranchRecord, EpisodeRecord, Fork, StopReason, TurnRecord, branch_record
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokens import Floats, Ids, Tokens
from agentrt.engine.service import EngineService
from agentrt.engine.step import EngineCore
from agentrt.rollout.mismatch import (
    Chosen,
    ScoredTurn,
    Turn,
    broken_bounds,
    choose,
    distance,
    distances,
    law_of,
    path_of,
    require_model,
    rescore,
    turns_of,
)
from agentrt.testing.toy import Logits, ToyRunner, hashed_logits

VOCAB = 50
LAW = SamplingParams(temperature=0.7, top_k=20, min_tokens=2, presence_penalty=0.5, stop_token_ids=(3,))
OLD, NEW = hashed_logits(VOCAB), hashed_logits(VOCAB, salt=1)
INFO = EngineInfo(model="toy", model_hash="h", vocab_size=VOCAB, context_length=200)


@asynccontextmanager
async def service(logits: Logits, *, keeps_kv: bool = False) -> AsyncIterator[EngineService]:
    runner = ToyRunner(logits, page_size=4)
    runner.keeps_kv = keeps_kv
    spec = EngineSpec(page_size=4, kv_tokens=256)
    async with EngineService(EngineCore(runner, spec, vocab_size=VOCAB, bytes_of=lambda _: b"x"), INFO) as engine:
        yield engine
    engine.core.check()


def turn_record(done: Completion) -> TurnRecord:
    end = done.context_tokens + len(done.token_ids)
    return TurnRecord(
        start=done.context_tokens, end=end, seed=done.seed, finish_reason=done.finish_reason,
        cached_tokens=done.cached_tokens, oldest_kv=done.oldest_kv, reprefilled_tokens=done.kv.reprefilled_tokens,
        restored_tokens=done.kv.restored_tokens, verifications=done.verifications,
    )  # fmt: skip


def record(*branches: BranchRecord, member: int = 0, **changed: object) -> EpisodeRecord:
    one = EpisodeRecord(
        task_id="t", member=member, attempt=0, seed=1, status="ok", stop_reason=StopReason.COMPLETED, truncated=False,
        reward=1.0, branches=list(branches),
    )  # fmt: skip
    return msgspec.structs.replace(one, **changed)


async def with_a_fork() -> EpisodeRecord:
    """Two turns, a fork after the first, a turn in it."""
    async with service(OLD) as engine:
        with engine.session(seed=5) as main:
            first = await main.sample(list(range(9)), LAW, max_tokens=6)
            at = len(main.tokens)
            with main.fork() as side:
                second = await main.sample([7, 8], LAW, max_tokens=5)
                third = await side.sample([9], LAW, max_tokens=4)
            branches = (
                branch_record("main", main.tokens, [turn_record(first), turn_record(second)]),
                branch_record("side", side.tokens, [turn_record(third)], Fork("main", at)),
            )
    return record(*branches)


@pytest.mark.anyio
async def test_turns_and_forks_have_the_recorded_logprobs() -> None:
    found = await with_a_fork()
    assert len(found.branches[1].token_ids) == 1 + found.branches[1].mask.count(1)
    async with service(OLD) as engine:
        turns = await rescore(engine, found, LAW, version=0)
        assert engine.statistics().tokens_reused == 0  # from scratch, each of them
    assert [turn.path for turn in turns] == ["cold", "cached", "cached"]
    assert [len(turn.recorded) for turn in turns] == [turn.end - turn.start for b in found.branches for turn in b.turns]
    assert all(turn.recorded == turn.reference and turn.num_other == 0 for turn in turns)
    rows = distances(turns)
    assert list(rows) == ["all", "cold", "cached"]
    assert (rows["all"].mean, rows["all"].maximum, rows["all"].kl, rows["all"].cut) == (0.0, 0.0, 0.0, 0)
    assert (rows["all"].ratio_p1, rows["all"].ratio_p50, rows["all"].ratio_p99) == (1.0, 1.0, 1.0)


@pytest.mark.anyio
async def test_a_logprob_that_was_tampered_with_is_found() -> None:
    found = await with_a_fork()
    found.branches[0].logprobs[found.branches[0].turns[1].start] -= 0.25
    async with service(OLD) as engine:
        rows = distances(await rescore(engine, found, LAW, version=0))
    assert rows["cold"].maximum == 0.0
    assert rows["cached"].maximum == rows["all"].maximum == pytest.approx(0.25, abs=1e-6)
    assert rows["all"].mean == pytest.approx(0.25 / rows["all"].tokens, abs=1e-6)
    assert broken_bounds(rows, mean=None, maximum=0.3) == []
    assert broken_bounds(rows, mean=None, maximum=0.2) == [
        "maximum |Δlogprob| of path all is 0.25, above the bound of 0.2",
        "maximum |Δlogprob| of path cached is 0.25, above the bound of 0.2",
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(("mode", "path"), [("keep", "kept"), ("recompute", "recomputed")])
async def test_an_update_between_turns(mode: UpdateMode, path: str) -> None:
    """Of the two versions, the reference has one; the ids of the other are counted."""
    async with service(OLD, keeps_kv=True) as engine:
        with engine.session(seed=5) as session:
            first = await session.sample(list(range(9)), LAW, max_tokens=6)
            await engine.update_weights(3, {"logits": NEW}, mode)
            second = await session.sample([7], LAW, max_tokens=5)
            found = record(branch_record("main", session.tokens, [turn_record(first), turn_record(second)]))
    async with service(NEW) as engine:
        turns = await rescore(engine, found, LAW, version=3)
    assert [(len(turn.recorded), turn.num_other) for turn in turns] == [
        (0, len(first.token_ids)), (len(second.token_ids), 0)
    ]  # fmt: skip
    rows = distances(turns)
    assert list(rows) == ["all", path]
    assert rows["all"].maximum == 0.0


def turn(versions: Sequence[int], **fields: int) -> Turn:
    ids = Ids(versions)
    entry = TurnRecord(start=4, end=4 + len(ids), seed=0, finish_reason="stop", **fields)
    return Turn(entry, Ids(range(4)), ids, Floats(0.0 for _ in ids), ids)


@pytest.mark.parametrize(
    ("found", "version", "path"),
    [
        (turn([0, 0], oldest_kv=0), 0, "cold"),
        (turn([0, 0], oldest_kv=0, cached_tokens=4), 0, "cached"),
        (turn([0, 0], oldest_kv=0, cached_tokens=4, restored_tokens=4), 0, "restored"),
        (turn([0, 0], oldest_kv=0, reprefilled_tokens=2, cached_tokens=2), 0, "recomputed"),
        (turn([1, 1], oldest_kv=0, cached_tokens=4), 1, "kept"),
        (turn([0, 1], oldest_kv=0), 1, "kept"),
        (turn([0, 1], oldest_kv=0), 0, "cold"),
        (turn([0, 1], oldest_kv=0, reprefilled_tokens=5), 1, "recomputed"),
        (turn([1, 2], oldest_kv=0, reprefilled_tokens=5), 2, "kept"),
        (turn([0, 0]), 0, "cold"),
    ],
)
def test_the_path_of_a_turn(found: Turn, version: int, path: str) -> None:
    assert path_of(found, version) == path


def test_the_figures_by_hand() -> None:
    """d = t - r of ln 2, -ln 2, 0 and one that the law cuts."""
    two = math.log(2.0)
    found = distance(Floats([-1.0, -1.0, -1.0, -1.0]), Floats([two - 1, -two - 1, -1.0, -math.inf]))
    assert (found.tokens, found.cut, found.maximum) == (4, 1, 20.0)
    assert found.mean == pytest.approx((2 * two + 20) / 4, abs=1e-6)
    assert found.kl == pytest.approx(((1 - two) + (two - 0.5) + 0 + (math.exp(-20) + 19)) / 4, abs=1e-6)
    assert (found.ratio_p1, found.ratio_p50) == (pytest.approx(0.015, abs=1e-3), pytest.approx(0.75, abs=1e-6))


def test_speculative_and_quantised_turns_are_counted_in_both_rows() -> None:
    one, two = Floats([-1.0]), Floats([-1.0, -2.0])
    rows = distances([ScoredTurn("cold", True, False, two, two, 0), ScoredTurn("cached", False, True, one, one, 3)])
    assert {row: found.tokens for row, found in rows.items()} == {
        "all": 3, "cold": 2, "cached": 1, "speculative": 2, "quantised": 1
    }  # fmt: skip


def test_a_share_is_the_same_each_time_and_never_empty() -> None:
    tokens = Tokens()
    tokens.observe([1, 2])
    tokens.commit(49, -1.0, 0)
    branch = branch_record("main", tokens, [TurnRecord(start=2, end=3, seed=0, finish_reason="stop")])
    records = [record(branch, member=member) for member in range(20)] + [record(branch, member=20, status="error")]
    whole, some, one = (choose(records, share) for share in (1.0, 0.25, 0.001))
    assert (len(whole.keys), len(some.keys), len(one.keys)) == (20, 5, 1)
    assert one.keys < some.keys < whole.keys
    assert some == choose(reversed(records), 0.25)
    assert (some.finished, some.longest, some.top_id) == (20, 3, 49)
    assert choose([], 0.5) == Chosen(set(), 0, 0, 0)


def test_the_law_is_the_one_that_the_logprobs_are_of() -> None:
    assert law_of(record(), LAW) == LAW
    assert law_of(record(logprobs_of="raw"), LAW) == SamplingParams()
    assert law_of(record(logprobs_of="temperature_only"), LAW) == SamplingParams(temperature=0.7)
    assert list(turns_of(record())) == []


def test_another_model_is_refused() -> None:
    chosen = Chosen(set(), 1, longest=10, top_id=49)
    require_model(chosen, INFO, "h")
    require_model(chosen, INFO, "")
    with pytest.raises(UsageError, match="sampled by the weights other, and toy has others, h; give --model"):
        require_model(chosen, INFO, "other")
    with pytest.raises(UsageError, match="holds id 50, and toy has ids below 50"):
        require_model(chosen._replace(top_id=50), INFO, "h")
    with pytest.raises(UsageError, match="holds 201 ids in a row, and toy has a context of 200"):
        require_model(chosen._replace(longest=201), INFO, "h")
