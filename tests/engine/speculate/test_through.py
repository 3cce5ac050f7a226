"""Speculation through what happens to a conversation: swap, updates in flight, next epoch; C27, rows 12, 13, 40 to 42."""

import sys
from collections.abc import Collection
from collections.abc import Sequence as List
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from test_speculation import (
    VOCAB,
    drain,
    everything,
    half_right,
    keep_open,
    make_core,
    prompt,
    propose_with,
    request,
    sampled,
    submit,
)

import agentrt_kernels.sample
from agentrt.core.protocol import UpdateMode
from agentrt.core.spec import EngineSpec, SamplingParams, Verifier
from agentrt.core.tokens import Tokens
from agentrt.engine.kv.group import Group
from agentrt.engine.sampler import laws_of, sample
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import Draft
from agentrt.engine.speculate.gate import Terms
from agentrt.engine.step import EngineCore
from agentrt.engine.update import Update
from agentrt.testing.toy import ToyRunner, hashed_logits
from agentrt_kernels import compiled
from agentrt_kernels.sample import cpu
from agentrt_kernels.sample.rules import Rule, Rules


def with_host(speculate: bool) -> EngineCore:
    """A pool that holds a few of the conversations, and a host for the others."""
    runner = ToyRunner(hashed_logits(VOCAB), page_size=4, groups=[Group(28)], host_pages=200)
    spec = EngineSpec(
        page_size=4, kv_tokens=112, max_batch=4, step_tokens=64, speculate="auto" if speculate else "off", debug=True
    )
    return EngineCore(runner, spec, vocab_size=VOCAB, bytes_of=lambda token_id: b"%c" % (97 + token_id))


def talk(core: EngineCore, texts: list[list[int]] | None = None) -> list[Any]:
    """Six conversations of three turns; a tool runs after each."""
    by_sequence: dict[Sequence, list[int]] = {}
    if texts:
        propose_with(core, half_right(by_sequence))
    all_tokens, leases, found = [Tokens() for _ in range(6)], [core.open() for _ in range(6)], []
    for turn in range(3):
        sequences = []
        for index, (tokens, lease) in enumerate(zip(all_tokens, leases, strict=True)):
            tokens.observe(prompt(index) if turn == 0 else [index, turn, 3, 4, 5])
            sequence = Sequence(tokens=tokens, **{**request(index), "seed": 10 * index + turn})  # type: ignore[arg-type]
            if texts:
                by_sequence[sequence] = texts[6 * turn + index]
            core.submit(sequence, lease)
            sequences.append(sequence)
        drain(core)
        found += [(sampled(one), everything(one)[1], one.kv.restored_tokens, one.accepted) for one in sequences]
        for lease in leases:
            core.pause(lease, "search")
    return found


def test_the_same_bits_when_kv_comes_back_from_the_host() -> None:
    plain = talk(with_host(speculate=False))
    found = talk(with_host(speculate=True), [ids for ids, *_ in plain])
    assert [one[:2] for one in found] == [one[:2] for one in plain]
    assert sum(restored for _, _, restored, _ in found) > 0
    assert sum(accepted for *_, accepted in found) > 40


@pytest.mark.parametrize("mode", ["recompute", "keep", "drain", "abort_resume"])
def test_a_version_never_changes_within_a_verification(mode: UpdateMode) -> None:
    """Updates while drafts are verified: ids, logprobs and versions are those of plain decoding, update for update."""
    plain = updated(make_core(speculate=False), mode)
    core = make_core()
    found = updated(core, mode, [ids for ids, _, _ in plain])
    for (ids, versions, bits), (expected_ids, _, expected_bits) in zip(found, plain, strict=True):
        assert versions == sorted(versions)
        if mode == "drain":
            assert len(set(versions)) == 1
            assert (ids, bits) == (expected_ids, expected_bits)
    assert core.statistics(0).tokens_accepted > 20


def updated(core: EngineCore, mode: UpdateMode, texts: list[list[int]] | None = None) -> list[Any]:
    """Requests through two updates of the weights; every verification asserts the version of all that it commits."""
    by_sequence: dict[Sequence, list[int]] = {}
    if texts:
        propose_with(core, half_right(by_sequence))
    sequences = [submit(core, prompt(index), seed=index, max_tokens=20) for index in range(6)]
    by_sequence |= dict(zip(sequences, texts or [], strict=False))
    cast(ToyRunner, core.runner).keeps_kv = mode == "keep"
    for version in (1, 2):
        for _ in range(2):
            before = [len(one.tokens) for one in sequences]
            core.step()
            for one, length in zip(sequences, before, strict=True):
                assert set(one.tokens.versions[max(length, one.context_tokens) :]) <= {core.version}
        install = core.stage({"logits": hashed_logits(VOCAB, spread=1.0 + version)})
        core.begin_update(Update(version=version, mode=mode, install=install))
        while core.update is not None:
            core.step()
    drain(core)
    return [(sampled(one), one.tokens.versions[one.context_tokens :].tolist(), everything(one)[1]) for one in sequences]


def test_the_last_epochs_rollout_drafts_the_next_and_changes_nothing() -> None:
    """Row 12: the same task after an update: what the old policy said is proposed, and only judged by the new one."""
    new = hashed_logits(VOCAB, spread=3.3)
    core = make_core()
    keep_open(core)
    first = submit(core, prompt(3), seed=3, max_tokens=30)
    drain(core)
    core.begin_update(Update(version=1, mode="recompute", install=core.stage({"logits": new})))
    drain(core)
    second = submit(core, prompt(3), seed=3, max_tokens=30)
    drain(core)
    expected = submit(other := make_core(new, speculate=False), prompt(3), seed=3, max_tokens=30)
    drain(other)
    assert sampled(second) == sampled(expected)
    assert sampled(first) != sampled(second)
    assert second.drafted > second.accepted > 0


def cut_law(prefix: List[int]) -> np.ndarray:
    """C27's distribution, whatever came before."""
    row = np.full(VOCAB, -np.inf, dtype=np.float32)
    row[:5] = np.log([0.40, 0.30, 0.15, 0.10, 0.05])
    return row


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
@pytest.mark.parametrize("verifier", ["coupled", "rejection", "block"])
def test_c27_topk_then_topp_under_every_verifier(verifier: Verifier, drawn: bool) -> None:
    """C27 and row 40: support {0, 1}, logprobs -0.559616 and -0.847298, for drafts that are chosen and that are drawn."""
    core, rng = make_core(cut_law, verifier=verifier), np.random.default_rng(0)
    keep_open(core)
    q = np.zeros(VOCAB)
    q[:3] = [0.5, 0.3, 0.2]

    def draft(sequences: Collection[Sequence], terms: Terms) -> dict[Sequence, Draft]:
        found = {}
        for one in sequences:
            length = min(3, one.max_tokens - one.num_sampled - 1)
            ids = rng.choice(VOCAB, size=length, p=q).tolist() if drawn else [1, 2, 0][:length]
            if ids:
                found[one] = Draft(tuple(ids), (q,) * length if drawn else ())
        return found

    assert core.speculator is not None
    core.speculator._from_text = draft  # type: ignore[method-assign]
    params = SamplingParams(top_k=3, top_p=0.80)
    sequences = [submit(core, [0, 1], params=params, seed=seed, max_tokens=9) for seed in range(60)]
    drain(core)
    ids = np.concatenate([sampled(one) for one in sequences])
    logprobs = np.concatenate([one.tokens.logprobs[one.context_tokens :] for one in sequences])
    assert set(ids.tolist()) == {0, 1}
    assert logprobs[ids == 0] == pytest.approx(-0.559616, abs=1e-6)
    assert logprobs[ids == 1] == pytest.approx(-0.847298, abs=1e-6)
    share, spread = (ids == 0).mean(), (0.571429 * 0.428571 / len(ids)) ** 0.5
    assert abs(share - 0.571429) < 4 * spread
    assert sum(one.accepted for one in sequences) > 50


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_row_13_logprobs_are_those_of_the_rows_that_were_committed(chunk: int) -> None:
    """Row 13: drafts beside prompt chunks; every logprob is that of its own prefix, computed apart."""
    logits = hashed_logits(VOCAB)
    core = make_core(rows=8 + chunk, batch=4)
    plain = [submit(other := make_core(speculate=False), prompt(index), seed=index) for index in range(1)]
    drain(other)
    texts = {}
    propose_with(core, half_right(texts))
    sequences = []
    for index in range(6):
        sequence = submit(core, prompt(index), seed=index, max_tokens=12)
        texts[sequence] = sampled(plain[0])
        sequences.append(sequence)
    drain(core)
    for one in sequences:
        ids = one.tokens.token_ids
        for place in range(one.context_tokens, len(ids)):
            row = logits(ids[:place].tolist()).astype(np.float64)
            expected = row[ids[place]] - np.log(np.exp(row - row.max()).sum()) - row.max()
            assert one.tokens.logprobs[place] == pytest.approx(expected, abs=1e-5)
    assert sum(one.drafted for one in sequences) > 20


@pytest.mark.parametrize("verifier", ["coupled", "rejection", "block"])
def test_row_41_ranks_that_see_the_same_rows_decide_alike(verifier: Verifier) -> None:
    """Row 41: the same requests on two engines, in other batches and another order: the same bits, accepted ids included."""

    def proposed(sequence: Sequence) -> list[int]:
        rng = np.random.default_rng((sequence.seed, len(sequence.tokens)))
        return cast("list[int]", rng.integers(4, size=5).tolist())

    def few_ids(prefix: List[int]) -> Any:
        row = hashed_logits(VOCAB)(prefix)
        row[4:] -= 9
        return row

    found = []
    for batch, order in ((64, range(24)), (3, reversed(range(24)))):
        core = make_core(few_ids, verifier=verifier, batch=batch)
        propose_with(core, proposed)
        params = SamplingParams(temperature=0.9, top_k=6, top_p=0.95)
        by_index = {index: submit(core, prompt(index), params=params, seed=index, max_tokens=20) for index in order}
        drain(core)
        found.append([(everything(by_index[index])[:8], by_index[index].accepted) for index in range(24)])
    assert found[0] == found[1]
    assert sum(accepted for _, accepted in found[0]) > 30


def test_row_41_the_law_is_added_up_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 41: the same bits whenever it is asked, with one thread and with several, in whatever place of the batch."""
    monkeypatch.setattr(compiled, "SPREAD_ABOVE_NANOSECONDS", 0)
    rng = np.random.default_rng(0)
    logits_MV = (4 * rng.standard_normal((9, 4000))).astype(np.float32)
    rules, seeds_M, positions_M = [Rule(0.8, 50, 0.9, 0.01)] * 9, np.arange(9, dtype=np.uint64), np.arange(9)
    places = rng.permutation(9)
    first = cpu.sample(logits_MV, 4000, Rules.of(rules), seeds_M, positions_M)
    for threads in (1, 2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        again = cpu.sample(logits_MV[places], 4000, Rules.of(rules), seeds_M[places], positions_M[places])
        for one, other in zip(first, again, strict=True):
            assert one[places].tobytes() == other.tobytes()


def test_row_42_what_is_missing_is_said_and_never_replaced_by_something_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 42: without its kernel the sampler raises, and there is no other verifier to fall back to."""
    monkeypatch.delattr(agentrt_kernels.sample, "launch", raising=False)  # as if nobody had imported it before
    monkeypatch.setitem(sys.modules, "agentrt_kernels.sample.launch", None)
    sequence = Sequence(tokens=Tokens(), params=SamplingParams(temperature=0.7), max_tokens=1)
    with pytest.raises(ImportError):
        sample(torch.zeros(1, VOCAB), [sequence], laws_of([sequence], VOCAB), VOCAB)
    with pytest.raises(ValueError, match="verifier"):
        msgspec.convert({"verifier": "greedy"}, EngineSpec)
