"""Speculation in the engine's core: the same ids and bits with it and without, whatever is drafted (C33, C35)."""

import random
from collections.abc import Callable
from collections.abc import Sequence as List

import numpy as np
import pytest

from agentrt.core.spec import EngineSpec, SamplingParams, Verifier
from agentrt.core.tokens import IntArray, Tokens
from agentrt.engine.kv.group import Group
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import NO_DRAFT, Draft
from agentrt.engine.speculate.gate import OpenGate, Terms
from agentrt.engine.step import EngineCore
from agentrt.testing.toy import Logits, ToyRunner, hashed_logits

VOCAB = 24
Proposer = Callable[[Sequence], List[int]]


def make_core(
    logits: Logits | None = None, *, speculate: bool = True, verifier: Verifier = "coupled", pages: int = 256, rows: int = 512,
    batch: int = 64, windows: tuple[int, ...] = (), draft_length: int = 8, draft_branches: int = 1,
) -> EngineCore:  # fmt: skip
    groups = [Group(pages), *(Group(pages, window) for window in windows)]
    runner = ToyRunner(logits or hashed_logits(VOCAB), page_size=4, groups=groups)
    spec = EngineSpec(
        page_size=4, kv_tokens=4 * pages, step_tokens=rows, max_batch=batch, speculate="auto" if speculate else "off",
        verifier=verifier, draft_length=draft_length, draft_branches=draft_branches,
    )  # fmt: skip
    return EngineCore(runner, spec, vocab_size=VOCAB, bytes_of=lambda token_id: b"%c" % (97 + token_id))


def keep_open(core: EngineCore) -> None:
    """Verify every draft whole, whatever it costs: rows of the toy model are dear."""
    assert core.speculator is not None
    core.speculator.gate = OpenGate()


def propose_with(core: EngineCore, proposer: Proposer) -> None:
    """Draft what `proposer` says."""
    keep_open(core)
    assert core.speculator is not None

    def draft(sequence: Sequence) -> Draft:
        limit = min(8, sequence.max_tokens - sequence.num_sampled - 1)
        return Draft(tuple(proposer(sequence)[:limit])) if limit > 0 else NO_DRAFT

    core.speculator._from_text = lambda sequences, terms: {one: found for one in sequences if (found := draft(one)).ids}  # type: ignore[method-assign]


def submit(core: EngineCore, prompt: list[int], **more: object) -> Sequence:
    tokens = Tokens()
    tokens.observe(prompt)
    sequence = Sequence(tokens=tokens, **{"params": SamplingParams(), "max_tokens": 12, **more})  # type: ignore[arg-type]
    core.submit(sequence, core.open())
    return sequence


def drain(core: EngineCore) -> None:
    while not core.is_idle:
        core.step()
        core.check()


def sampled(sequence: Sequence) -> list[int]:
    return sequence.tokens.token_ids[sequence.context_tokens :].tolist()


def everything(sequence: Sequence) -> tuple[object, ...]:
    """All that a request gives, bits included, and how much of the KV it holds at the end."""
    tokens, start = sequence.tokens, sequence.context_tokens
    return (
        sampled(sequence), tokens.logprobs[start:].tolist(), sequence.raw_logprobs.tolist(), sequence.kept_logmass.tolist(),
        sequence.top_logprobs, sequence.finish_reason, sequence.matched_stop, sequence.error, sequence.lease.computed,
        len(sequence.lease.pages),
    )  # fmt: skip


def request(index: int) -> dict[str, object]:
    """Mixed parameters; every processor has its turn, alone and beside others."""
    rng = random.Random(index)

    def some(share: float, value: object, default: object) -> object:
        return value if rng.random() < share else default

    params = SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 1.0, 1.4]), top_k=rng.choice([0, 0, 3, 8]), top_p=rng.choice([1.0, 0.9, 0.6]),
        min_p=rng.choice([0.0, 0.0, 0.1]), repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.8]), frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        logit_bias=some(0.2, {3: 2.0, 5: -1e9}, {}), bad_words=some(0.2, ((1, 2), (7,), (4, 4, 4)), ()),
        min_tokens=rng.choice([0, 0, 4]), stop_token_ids=some(0.4, (9, 10), ()), stop=some(0.2, ("ab", "fgh", "l"), ()),
        top_logprobs=rng.choice([0, 0, 2]),
    )  # fmt: skip
    grammar = some(0.2, lambda ids: [i for i in range(VOCAB) if (i + len(ids)) % 3 or i in (9, 10)], None)
    return {"params": params, "max_tokens": rng.randint(6, 20), "seed": index, "grammar": grammar}


def prompt(index: int) -> list[int]:
    rng = random.Random(-index)
    return [1, 2, 3, 4] + [rng.randrange(VOCAB) for _ in range(rng.randrange(20))]


def half_right(texts: dict[Sequence, list[int]], seed: int = 0) -> Proposer:
    """Drafts that follow the text to come for a while and then do not; of any length, none included."""
    rng = random.Random(seed)

    def propose(sequence: Sequence) -> list[int]:
        ids = texts[sequence][sequence.num_sampled :][: rng.randrange(9)]
        return [token_id if rng.random() < 0.8 else rng.randrange(VOCAB) for token_id in ids]

    return propose


def propose_half_right(core: EngineCore, texts: dict[Sequence, list[int]]) -> None:
    propose_with(core, half_right(texts))


def run_all(
    core: EngineCore, count: int, texts: list[list[int]] | None = None,
    propose: Callable[[EngineCore, dict[Sequence, list[int]]], None] = propose_half_right,
) -> list[Sequence]:  # fmt: skip
    """Submit so many requests and run them; with `texts`, what each will say, drafts are proposed from these."""
    by_sequence: dict[Sequence, list[int]] = {}
    if texts:
        propose(core, by_sequence)
    sequences = [submit(core, prompt(index), **request(index)) for index in range(count)]
    by_sequence |= dict(zip(sequences, texts or [], strict=False))
    drain(core)
    return sequences


def test_the_same_bits_with_speculation_and_without() -> None:
    """200 seeded requests over mixed parameters, rows 7 and 36: penalties, grammars and stop state after a rejection."""
    plain = run_all(make_core(speculate=False, pages=4096), 200)
    core = make_core(pages=4096)
    found = run_all(core, 200, [sampled(sequence) for sequence in plain])
    for index, (one, other) in enumerate(zip(found, plain, strict=True)):
        assert everything(one) == everything(other), index
    assert sum(one.accepted for one in found) > 200
    assert sum(one.drafted - one.accepted for one in found) > 200
    assert len({one.finish_reason for one in found}) == 2


@pytest.mark.parametrize(
    "limits",
    [
        {"rows": 8, "batch": 4},
        {"rows": 40, "batch": 8, "pages": 24},
        {"windows": (6,)},
    ],
    ids=["chunks", "preemption", "windows"],
)
def test_the_same_bits_in_chunks_with_preemption_and_windows(limits: dict[str, int]) -> None:
    plain = run_all(make_core(speculate=False), 24)
    core = make_core(**limits)  # type: ignore[arg-type]
    for _ in range(40):
        core._lengths.add(1)
    found = run_all(core, 24, [sampled(sequence) for sequence in plain])
    assert [everything(one)[:8] for one in found] == [everything(other)[:8] for other in plain]
    assert sum(one.accepted for one in found) > 20
    assert ("pages" in limits) == (core.statistics(0).preemptions > 0)


def test_drafts_come_from_what_was_said() -> None:
    """The engine's own proposer: the second of two equal requests is drafted from the first."""
    plain = submit(core := make_core(speculate=False), prompt(1), max_tokens=40)
    drain(core)
    core = make_core()
    keep_open(core)
    for _ in range(2):
        sequence = submit(core, prompt(1), max_tokens=40)
        drain(core)
        assert everything(sequence) == everything(plain)
    found = core.statistics(0)
    assert found.tokens_accepted >= sequence.accepted > 20
    assert found.verifications >= sequence.verifications == 5  # 1 + 4 x 9 + 3


def test_rejected_drafts_are_never_cached() -> None:
    """What the prefix cache holds is what was committed: another request finds exactly that."""
    core = make_core()
    propose_with(core, lambda sequence: [VOCAB - 1] * 8)
    sequence = submit(core, prompt(3), seed=3, max_tokens=21)
    drain(core)
    again = submit(core, sequence.tokens.token_ids.tolist(), seed=5)
    drain(core)
    assert again.cached_tokens == sequence.lease.computed // 4 * 4
    expected = submit(other := make_core(speculate=False), sequence.tokens.token_ids.tolist(), seed=5)
    drain(other)
    assert sampled(again) == sampled(expected)


@pytest.mark.parametrize("penalty", [1.0, 1.1])
@pytest.mark.parametrize("length", range(1, 9))
def test_c33_greedy_output_is_that_of_plain_decoding(length: int, penalty: float) -> None:
    """C33: after [1, 1, 1] the drafter says 1, the model says 2, 3, 1, 1, 2, 3, 1, 1."""
    right = [2, 3, 1, 1, 2, 3, 1, 1]

    def logits(prefix: List[int]) -> np.ndarray:
        row = np.zeros(VOCAB, dtype=np.float32)
        row[right[(len(prefix) - 3) % 8]] = 50.0
        return row

    core = make_core(logits, draft_length=length)
    propose_with(core, lambda sequence: [1] * length)
    params = SamplingParams(temperature=0, repetition_penalty=penalty)
    sequence = submit(core, [1, 1, 1], params=params, max_tokens=8)
    core.step()
    assert sampled(sequence) == [2]
    core.step()
    assert (sequence.drafted, sequence.accepted) == (min(length, 6), 0)
    drain(core)
    assert sampled(sequence) == right
    assert sequence.accepted == (2 if length == 1 else 3)


def agreeing(text: list[int], draft: list[int], **more: object) -> Sequence:
    """A model that says `text` for sure, and one draft after the first id of it."""

    def logits(prefix: List[int]) -> np.ndarray:
        row = np.zeros(VOCAB, dtype=np.float32)
        row[text[min(len(prefix) - 1, len(text) - 1)]] = 200.0
        return row

    core = make_core(logits)
    propose_with(core, lambda sequence: draft if sequence.num_sampled == 1 else [])
    sequence = submit(core, [0], **more)
    drain(core)
    plain = submit(other := make_core(logits, speculate=False), [0], **more)
    drain(other)
    assert everything(sequence) == everything(plain)
    core.cache.close(sequence.lease)
    core.check()
    return sequence


def test_c35_end_ids_and_lengths_inside_a_draft() -> None:
    """C35 a to d, each after a first id 4; the KV used equals that of plain decoding (`everything`)."""
    end = SamplingParams(stop_token_ids=(9,))
    a = agreeing([4, 5, 9, 7, 8], [5, 9, 7, 8], params=end)
    assert (sampled(a), a.finish_reason, len(a.raw_logprobs), a.accepted) == ([4, 5, 9], "stop", 3, 2)
    b = agreeing([4, 5, 6, 11, 12], [5, 9, 7], params=end, max_tokens=5)
    assert (sampled(b), b.finish_reason, b.accepted) == ([4, 5, 6, 11, 12], "length", 1)
    c = agreeing([4, 5, 6, 7, 8, 4], [5, 6, 7, 8, 4], max_tokens=4)
    assert (sampled(c), c.finish_reason) == ([4, 5, 6, 7], "length")
    d = agreeing([4, 5, 9, 7, 8, 9], [5, 9, 7, 8], params=SamplingParams(stop_token_ids=(9,), min_tokens=5))
    assert 9 not in sampled(d)[:5]
    assert d.accepted == 1


def test_an_id_that_ends_the_turn_is_not_drafted() -> None:
    """The row before it samples it anyway, so it would be a row for nothing; so is a draft of nothing else."""
    core = make_core()
    keep_open(core)
    assert core.speculator is not None
    for text in ([1, 2, 3, 5, 6, 9, 7, 7], [11, 12, 13, 9, 7, 7]):
        core.speculator.memory.add(IntArray("i", text), 0)
    params = SamplingParams(stop_token_ids=(9,))
    some, none = (submit(core, prompt, params=params, max_tokens=30) for prompt in ([0, 1, 2, 3], [0, 11, 12, 13]))
    drafts = core.speculator._from_text([some, none], Terms(0.0, 1.0, 8))
    assert drafts == {some: Draft((5, 6), (), "text, one match, 2 and more")}
    other = submit(core, [0, 1, 2, 3], max_tokens=30)
    assert core.speculator._from_text([other], Terms(0.0, 1.0, 8))[other].ids == (5, 6, 9, 7, 7)


def test_c28_a_stop_string_inside_a_draft() -> None:
    """C28: the id that completes the string is the last one, whatever the draft had after it."""
    sequence = agreeing([4, 5, 6, 7, 8], [5, 6, 7, 8], params=SamplingParams(stop=("fg",)))
    assert (sampled(sequence), sequence.finish_reason, sequence.matched_stop) == ([4, 5, 6], "stop", "fg")


def test_logits_that_are_no_numbers_inside_a_draft() -> None:
    def logits(prefix: List[int]) -> np.ndarray:
        row = hashed_logits(VOCAB)(prefix)
        return np.full_like(row, np.nan) if len(prefix) > 8 else row

    texts = {}
    for speculate in (False, True):
        core = make_core(logits, speculate=speculate)
        if speculate:
            propose_with(core, lambda sequence: [*texts[False][sequence.num_sampled :], 1, 2])
        sequence = submit(core, [1, 2, 3])
        drain(core)
        texts[speculate] = sampled(sequence)
        assert "NaN" in sequence.error
    assert texts[True] == texts[False]
    assert len(texts[True]) == 6


def test_drafts_make_way_for_decodes() -> None:
    """Row 39's kind: a step that has no rows or pages for drafts decodes without them, and nobody is preempted."""
    core = make_core(pages=8, batch=2, rows=3)
    propose_with(core, lambda sequence: [1] * 8)
    sequences = [submit(core, [index, 1, 2], seed=index, max_tokens=10) for index in range(2)]
    drain(core)
    assert all(len(sampled(sequence)) == 10 for sequence in sequences)
    assert max(core.runner.rows) <= 3  # type: ignore[attr-defined]
    assert core.statistics(0).preemptions == 0


@pytest.mark.parametrize("verifier", ["coupled", "rejection", "block"])
def test_the_engine_samples_the_law_under_every_verifier(verifier: Verifier) -> None:
    """Row 9: chi-square of 600 pairs of ids, both drafted; 32.91 is the 0.999 point of 12 degrees of freedom."""

    def logits(prefix: List[int]) -> np.ndarray:
        row = np.full(VOCAB, -np.inf, dtype=np.float32)
        row[:4] = 0.4 * np.random.default_rng(prefix[-1]).standard_normal(4)
        return row

    def law(last: int) -> np.ndarray:
        p = np.exp(logits([last])[:4].astype(np.float64))
        return p / p.sum()

    core = make_core(logits, verifier=verifier)
    propose_with(core, lambda sequence: [2, sequence.tokens.token_ids[-1]])
    sequences = [submit(core, [0], seed=seed, max_tokens=4) for seed in range(600)]
    while not core.is_idle:
        for sequence in core.step():
            core.cache.close(sequence.lease)
    core.check()
    pairs = np.zeros((4, 4))
    for sequence in sequences:
        _, one, two, _ = sampled(sequence)
        pairs[one, two] += 1
        logprob = sequence.tokens.logprobs[sequence.context_tokens + 2]
        assert logprob == pytest.approx(np.log(law(one)[two]), abs=1e-5)
    expected = np.stack([law(one) * pairs[one].sum() for one in range(4)])
    assert expected.min() > 5
    assert ((pairs - expected) ** 2 / expected).sum() < 32.91
    assert sum(sequence.accepted for sequence in sequences) > 100
