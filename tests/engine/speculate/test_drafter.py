"""Model drafts in the engine: the same bits with them and without, through everything that happens to a sequence."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heads import VOCAB, make_core, random_weights, target, write_draft

from agentrt.core.spec import SamplingParams, Verifier
from agentrt.core.tokens import Tokens
from agentrt.engine.model.decoder import expected_shapes
from agentrt.engine.sampler import laws_of
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.head import Step
from agentrt.engine.step import EngineCore
from agentrt.engine.update import Update
from agentrt_kernels.sample.reference import probabilities

KINDS = ["eagle3", "mtp", "small"]


def submit(core: EngineCore, ids: list[int], **more: Any) -> Sequence:
    tokens = Tokens()
    tokens.observe(ids)
    sequence = Sequence(tokens=tokens, **{"params": SamplingParams(), "max_tokens": 14, **more})
    core.submit(sequence, core.open())
    return sequence


def drain(core: EngineCore) -> None:
    while not core.is_idle:
        core.step()
        core.check()


def close_all(core: EngineCore, sequences: list[Sequence]) -> None:
    """The sessions end, and with them all that the draft model holds of them."""
    for sequence in sequences:
        core.close(sequence.lease)
    pool = drafter_of(core).cache.pool
    assert pool.num_available == pool.num_pages
    core.check()


def said(sequence: Sequence) -> tuple[list[int], list[float], str | None]:
    start = sequence.context_tokens
    return sequence.tokens.token_ids[start:].tolist(), sequence.tokens.logprobs[start:].tolist(), sequence.finish_reason


def request(index: int) -> dict[str, Any]:
    rng = random.Random(index)
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]), top_k=rng.choice([0, 5]), top_p=rng.choice([1.0, 0.8]),
        repetition_penalty=rng.choice([1.0, 1.2]), stop_token_ids=rng.choice([(), (), (9,)]),
    )  # fmt: skip
    return {"params": params, "seed": index, "max_tokens": rng.randint(16, 36)}


def prompt(index: int) -> list[int]:
    """The first 9 ids are shared: two whole pages."""
    rng = random.Random(-index)
    return [1, 2, 3, 4, 5, 6, 7, 8, 9] + [rng.randrange(VOCAB) for _ in range(rng.randrange(12))]


def run_all(core: EngineCore, count: int = 10) -> list[Sequence]:
    sequences = [submit(core, prompt(index), **request(index)) for index in range(count)]
    drain(core)
    return sequences


def next_turn(core: EngineCore, before: Sequence, observed: list[int]) -> Sequence:
    """A tool ran, and the same session goes on."""
    core.pause(before.lease, "search")
    before.tokens.observe(observed)
    sequence = Sequence(tokens=before.tokens, params=before.params, max_tokens=12, seed=5)
    core.submit(sequence, before.lease)
    drain(core)
    return sequence


def drafter_of(core: EngineCore) -> Any:
    assert core.speculator is not None
    assert core.speculator.drafter is not None
    return core.speculator.drafter


@pytest.mark.parametrize(
    "limits",
    [{}, {"step_tokens": 18, "max_batch": 4}, {"kv_tokens": 96, "max_batch": 8}, {"draft_branches": 2}],
    ids=["at once", "chunks", "preemption", "branches"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_with_a_draft_model_and_without(kind: str, limits: dict[str, int], tmp_path: Path) -> None:
    """Greedy requests among them: C33 for draft model, EAGLE and MTP."""
    plain = run_all(make_core(None))
    core = make_core(write_draft(tmp_path, kind), **limits)
    if "kv_tokens" in limits:
        for _ in range(40):
            core._lengths.add(1)
    found = run_all(core)
    assert [said(one) for one in found] == [said(one) for one in plain]
    assert sum(one.drafted for one in found) > 50
    assert ("kv_tokens" in limits) == (core.statistics(0).preemptions > 0)
    close_all(core, found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_draft_is_accepted_whole(kind: str, tmp_path: Path) -> None:
    """The coupling: a draft with the target's own law draws the target's own ids, at any temperature."""
    core = make_core(write_draft(tmp_path, kind))
    drafter = drafter_of(core)
    plain = submit(other := make_core(None), prompt(3), seed=3, max_tokens=13)
    drain(other)

    def forward(ids: Any, positions: Any, table_of: Any, tables: Any, kv: Any, rows: Any, features: Any) -> Any:
        """The target's own logits, computed from scratch."""
        logits = torch.stack([logits_after(plain, int(position) + 1) for position in positions[rows]])
        return Step(logits, torch.zeros(len(rows), 24))

    drafter.model.forward, drafter.model.ids_V = forward, None
    sequence = submit(core, prompt(3), seed=3, max_tokens=13)
    drain(core)
    assert said(sequence) == said(plain)
    assert (sequence.verifications, sequence.drafted, sequence.accepted) == (3, 9, 9)  # 1 + 3 x (3 + 1)


def logits_after(sequence: Sequence, count: int) -> torch.Tensor:
    """The law's logits after the first `count` ids, from the reference operations."""
    core = make_core(None)
    probe = submit(core, sequence.tokens.token_ids[:count].tolist(), max_tokens=1)
    seen: list[Any] = []
    run = core.runner.run
    core.runner.run = lambda batch: seen.append(run(batch)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    drain(core)
    assert probe.is_finished
    return torch.from_numpy(seen[-1][-1])


def fused_states(drafter: Any, ids: list[int]) -> torch.Tensor:
    """What the head is given of a text that is computed from its first id on."""
    whole = make_core(None)
    whole.runner.taps = (1, 2, 3)  # type: ignore[attr-defined]
    submit(whole, ids, max_tokens=1)
    drain(whole)
    fused: torch.Tensor = drafter.model.fuse(whole.runner.features_NF)  # type: ignore[attr-defined]
    return fused


@pytest.mark.parametrize("branches", [1, 2])
def test_hidden_states_are_those_of_the_rows_before(branches: int, tmp_path: Path) -> None:
    """What the head is given at row j is what the target made of id j - 1; zeros where nobody did (pitfall 9)."""
    core = make_core(write_draft(tmp_path, "eagle3"), step_tokens=7, max_batch=2, draft_branches=branches)
    drafter, given = drafter_of(core), {}  # type: Any, dict[int, torch.Tensor]
    features = drafter._features

    def watch(follower: Any, start: int, stop: int) -> Any:
        found = features(follower, start, stop)
        given.update(zip(range(start, stop), found, strict=True))
        return found

    drafter._features = watch
    sequence = submit(core, prompt(5), max_tokens=12)
    drain(core)
    ids = sequence.tokens.token_ids.tolist()
    fused = fused_states(drafter, ids)
    assert len(given) > sequence.context_tokens + 4
    for position, row in given.items():
        expected = fused[position - 1] if position else torch.zeros(24)
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)
    given.clear()
    turn = next_turn(core, sequence, [7] * 9)
    ids = turn.tokens.token_ids.tolist()
    fused = fused_states(drafter, ids)
    assert min(given) < turn.context_tokens - 9  # its own partial page was kept, and what was not drafted from yet
    for position, row in given.items():
        torch.testing.assert_close(row, fused[position - 1], atol=1e-4, rtol=1e-4)
    given.clear()
    again = submit(core, ids, max_tokens=6, seed=9)
    drain(core)
    first = min(given)
    assert first == again.cached_tokens > 8
    assert not given[first].any()
    for position in range(first + 1, len(ids)):
        torch.testing.assert_close(given[position], fused[position - 1], atol=1e-4, rtol=1e-4)


def test_a_second_choice_is_what_would_be_drawn_without_the_first(tmp_path: Path) -> None:
    """Where the policy is not sure, it is the draft's second that stands now and then; it goes where the gate expects it."""
    core = make_core(write_draft(tmp_path, "eagle3"), draft_branches=2, max_batch=64)
    drafter, seen = drafter_of(core), []  # type: Any, list[Any]
    draft = drafter.draft

    def watch(some: list[Sequence], length: int) -> Any:
        drafts = draft(some, length)
        seen.extend(drafts)
        return drafts

    drafter.draft = watch
    found = [submit(core, prompt(2), seed=seed, max_tokens=10) for seed in range(60)]
    drain(core)
    seen = [one for one in seen if one.ids]
    assert all(one.parents[-1] == -1 and one.ids[-1] != one.ids[0] for one in seen)
    assert core.speculator is not None
    stood = core.speculator.gate.kinds["eagle3, not the first choice"]._stood[0]
    assert stood > 1
    plain = [submit(other := make_core(None, max_batch=64), prompt(2), seed=3, max_tokens=10)]
    drain(other)
    assert said(found[3]) == said(plain[0])


def test_hidden_states_kept_are_those_of_followed_rows(tmp_path: Path) -> None:
    """Nothing is drafted, so they are kept: no more memory than their own rows take, whoever else was in the step."""
    core = make_core(write_draft(tmp_path, "eagle3"))
    core.speculator.gate.pays = lambda *_: False  # type: ignore[union-attr, method-assign]
    drafter = drafter_of(core)
    found = [submit(core, prompt(index), max_tokens=20) for index in range(3)]
    core.step()
    late = submit(core, list(range(20)) * 8, max_tokens=20)
    for _ in range(6):
        core.step()
    followers = [drafter._followers[one] for one in (*found, late)]
    parts = [part for follower in followers for _, part in follower.taken]
    memory = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    assert sum(memory.values()) == sum(part.nbytes for part in parts)
    chunk = next(part for _, part in followers[-1].taken if len(part) > 100)
    assert chunk.untyped_storage().nbytes() == chunk.nbytes
    drain(core)
    close_all(core, [*found, late])


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_is_beyond_the_context(kind: str, tmp_path: Path) -> None:
    """One is at the end of its context, and another's draft goes on."""
    core = make_core(write_draft(tmp_path, kind), draft_length=8)
    drafter, most, run = drafter_of(core), [0], core.runner.run_draft  # type: ignore[attr-defined]

    def watched(model: Any, kv: Any, batch: Any, features: Any) -> Step:
        most.append(int(batch.positions_N.max()))
        found: Step = run(model, kv, batch, features)
        return found

    core.runner.run_draft = watched  # type: ignore[attr-defined]
    near, far = submit(core, [1] * 244, max_tokens=12), submit(core, prompt(1), max_tokens=40)
    drain(core)
    assert max(most) == drafter.model.context_length - 1 == 255
    plain = make_core(None)
    expected = submit(plain, [1] * 244, max_tokens=12), submit(plain, prompt(1), max_tokens=40)
    drain(plain)
    assert [said(near), said(far)] == [said(one) for one in expected]
    assert near.drafted
    close_all(core, [near, far])


@pytest.mark.parametrize("mode", ["recompute", "keep", "drain", "abort_resume"])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_in_flight(kind: str, mode: Any, tmp_path: Path) -> None:
    """The same ids and versions with drafts and without, though weights change: no version within a verification."""
    found = {}
    weights = random_weights(expected_shapes(target().decoder.config), 5)
    for folder in (None, write_draft(tmp_path, kind)):
        core = make_core(folder)
        sequences = [submit(core, prompt(index), seed=index, max_tokens=12) for index in range(4)]
        while min(len(one.tokens) - one.context_tokens for one in sequences) < 4:
            core.step()
        lengths = [one.num_sampled for one in sequences]
        core.begin_update(Update(version=1, mode=mode, install=core.stage(weights)))
        drain(core)
        versions = [one.tokens.versions[one.context_tokens :].tolist() for one in sequences]
        expected = [12 if mode == "drain" else length for length in lengths]
        assert [version.count(0) for version in versions] == expected
        assert all(version == sorted(version) for version in versions)
        late = submit(core, prompt(9), seed=9)
        drain(core)
        found[folder is None] = said(late)
        if folder:
            assert drafter_of(core).model.target is core.runner.decoder  # type: ignore[attr-defined]
            close_all(core, [*sequences, late])
    assert found[True] == found[False]


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_recorded_q_is_what_was_drawn_from(verifier: Verifier, tmp_path: Path) -> None:
    """Row 10 and C27 on the real path: chi-square of drafted first ids against the q that came with them."""
    core = make_core(write_draft(tmp_path, "eagle3"), verifier=verifier, max_batch=64)
    drafter = drafter_of(core)
    params = SamplingParams(temperature=0.9, top_k=6, top_p=0.95)
    sequences = [submit(core, prompt(2), params=params, seed=seed, max_tokens=5) for seed in range(400)]
    counts, expected, draft = torch.zeros(VOCAB), torch.zeros(VOCAB), drafter.draft

    def watch(some: list[Sequence], length: int) -> Any:
        drafts = draft(some, length)
        for one in drafts:
            if one.ids:
                counts[one.ids[0]] += 1
                expected.add_(torch.from_numpy(one.q[0]).float())
                assert (one.q[0] > 0).sum() <= 6
                assert abs(one.q[0].sum() - 1) < 1e-12
        return drafts

    drafter.draft = watch
    while not core.is_idle:
        core.step()
    core.check()
    kept = expected > 5
    assert counts[expected == 0].sum() == 0
    statistic = float(((counts - expected) ** 2 / expected)[kept].sum())
    degrees = int(kept.sum())
    assert counts.sum() > 400
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5
    assert sum(one.accepted for one in sequences) > 0


@pytest.mark.parametrize("verifier", ["coupled", "rejection", "block"])
def test_row_9_chi_square_of_what_is_committed(verifier: Verifier, tmp_path: Path) -> None:
    """The first id of each verification against the law at its row: real logits, drafts drawn by a model, all cuts on."""
    core = make_core(write_draft(tmp_path, "mtp"), verifier=verifier, max_batch=64)
    params = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, presence_penalty=0.4)
    sequences = [submit(core, prompt(2), params=params, seed=seed, max_tokens=6) for seed in range(300)]
    counts, expected, commit = np.zeros(VOCAB), np.zeros(VOCAB), core._commit

    def watch(sampling: list[Sequence], logits_MV: Any) -> None:
        rules, row, places = laws_of(sampling, VOCAB).rules, 0, []
        for sequence in dict.fromkeys(sampling):
            if sequence.draft.ids:
                expected[:] += probabilities(logits_MV[row], rules[row], VOCAB)
                places.append((sequence, len(sequence.tokens)))
            row += 1 + len(sequence.draft.ids)
        commit(sampling, logits_MV)
        for sequence, place in places:
            counts[sequence.tokens.token_ids[place]] += 1

    core._commit = watch  # type: ignore[method-assign]
    while not core.is_idle:
        core.step()
    core.check()
    assert counts[expected == 0].sum() == 0
    kept = expected > 5
    degrees = int(kept.sum())
    assert counts.sum() > 600
    assert ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[kept].sum() < degrees + 4 * (2 * degrees) ** 0.5
    assert sum(one.accepted for one in sequences) > 20


def test_nobody_waits_for_a_draft(tmp_path: Path) -> None:
    """The draft model's pages are short: sequences decode without drafts, and nothing is lost."""
    core = make_core(write_draft(tmp_path, "mtp"))
    drafter = drafter_of(core)
    assert core.speculator is not None
    check, core.speculator.check = core.speculator.check, lambda: None  # type: ignore[method-assign]
    taken = drafter.cache.pools[0].take(drafter.cache.pool.num_free - 8)
    found = run_all(core, 6)
    drafter.cache.pools[0].release(taken)
    check()
    assert [said(one) for one in found] == [said(one) for one in run_all(make_core(None), 6)]


def test_a_model_that_rests_costs_the_target_nothing(tmp_path: Path) -> None:
    core = make_core(write_draft(tmp_path, "eagle3"))
    assert core.speculator is not None
    trial, drafter, taps = core.speculator.trial, drafter_of(core), set()
    run = core.runner.run
    core.runner.run = lambda batch: taps.add(core.runner.taps) or run(batch)  # type: ignore[method-assign, attr-defined, func-returns-value]
    first, second = submit(core, prompt(1), max_tokens=3), submit(core, prompt(2), max_tokens=30)
    while not first.is_finished:
        core.step()
    assert taps == {(1, 2, 3)}
    trial.fail()
    taps.clear()
    found = [first, second, *(submit(core, prompt(3), seed=seed, max_tokens=3) for seed in range(3))]
    before = second.drafted
    drain(core)
    assert taps == {()}
    assert before > 0
    assert second.drafted == before
    assert not any(one.drafted for one in found[2:])
    assert not drafter._resting
    assert drafter.cache.pool.num_available == drafter.cache.pool.num_pages
    trial.begin()
    assert next_turn(core, first, [4, 5]).drafted > 0
    close_all(core, found)


def test_idle_sessions_give_up_their_drafted_kv(tmp_path: Path) -> None:
    core = make_core(write_draft(tmp_path, "mtp"))
    drafter = drafter_of(core)
    found = [submit(core, prompt(index), seed=index, max_tokens=20) for index in range(6)]
    drain(core)
    held = sum(len(follower.lease.pages) for follower in drafter._resting.values())
    taken = drafter.cache.pools[0].take(drafter.cache.pool.num_free)
    more = submit(core, [20, 21, *prompt(9)], max_tokens=20)
    core.speculator.check = lambda: None  # type: ignore[method-assign, union-attr]
    drain(core)
    assert more.drafted > 6
    assert sum(len(follower.lease.pages) for follower in drafter._resting.values()) <= held
    drafter.cache.pools[0].release(taken)
    close_all(core, [*found, more])


def test_siblings_share_the_drafted_prompt(tmp_path: Path) -> None:
    core = make_core(write_draft(tmp_path, "eagle3"))
    rows, forward = [], drafter_of(core).model.forward

    def count(ids: Any, *rest: Any) -> Any:
        rows.append(len(ids))
        return forward(ids, *rest)

    drafter_of(core).model.forward = count
    ids = [index % VOCAB for index in range(33)]
    submit(core, ids, seed=1, max_tokens=8)
    drain(core)
    assert max(rows) == 34
    rows.clear()
    submit(core, ids, seed=2, max_tokens=8)
    drain(core)
    assert max(rows) == 2  # the id after eight pages, and the first sampled one
