"""The sampling law: exact values, and the compiled path against the definition."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentrt_kernels import compiled
from agentrt_kernels.sample import cpu, reference
from agentrt_kernels.sample.rules import NO_EDITS, Drawn, Edits, Rule, Rules

Sample = Callable[..., Drawn]
PATHS = pytest.mark.parametrize("sample", [reference.sample, cpu.sample], ids=["reference", "cpu"])


def draw(
    sample: Sample,
    logits: Any,
    rules: list[Rule],
    seeds: Any = None,
    positions: Any = None,
    vocab_size: int | None = None,
) -> Drawn:
    logits_BV = np.array(logits, dtype=np.float32)
    rows = len(logits_BV)
    seeds_B = np.arange(rows, dtype=np.uint64) if seeds is None else np.array(seeds, dtype=np.uint64)
    positions_B = np.zeros(rows, dtype=np.int64) if positions is None else np.array(positions)
    return sample(logits_BV, vocab_size or logits_BV.shape[1], Rules.of(rules), seeds_B, positions_B)


def edits(*entries: tuple[int, float, int, bool]) -> Edits:
    ids, bias, counts, seen = zip(*entries, strict=True)
    return Edits(np.array(ids), np.array(bias, dtype=np.float64), np.array(counts), np.array(seen))


def drawn_with(sample: Sample, logits: Any, rule: Rule, token: int) -> tuple[float, float, float]:
    """The logprob, raw logprob and kept log-mass of `token`, once a seed has drawn it."""
    drawn = draw(sample, [logits] * 200, [rule] * 200)
    row = drawn.ids_B.tolist().index(token)
    return drawn.logprobs_B[row], drawn.raw_logprobs_B[row], drawn.kept_logmass_B[row]


@PATHS
@pytest.mark.parametrize(
    ("rule", "logprob", "kept"),
    [
        (Rule(), -0.407606, 0.0),
        (Rule(temperature=0.5), -0.142932, 0.0),
        (Rule(temperature=0.5, top_k=2), -0.126928, -0.016004),
        (Rule(temperature=0.0), -0.407606, 0.0),
        (Rule(temperature=9e-6, top_k=1), -0.407606, 0.0),
    ],
)
def test_c26_logprob_of_the_tempered_law(sample: Sample, rule: Rule, logprob: float, kept: float) -> None:
    found = drawn_with(sample, [2, 1, 0], rule, 0)
    assert [round(float(number), 6) for number in found] == [logprob, -0.407606, kept]


@PATHS
def test_c27_topk_then_topp(sample: Sample) -> None:
    logits = np.log([0.40, 0.30, 0.15, 0.10, 0.05])
    rule = Rule(top_k=3, top_p=0.80)
    drawn = draw(sample, [logits] * 500 + [logits] * 3, [rule] * 500 + [Rule(temperature=0.0)] * 3)
    assert set(drawn.ids_B[:500].tolist()) == {0, 1}
    assert {round(float(x), 6) for x in drawn.logprobs_B[:500]} == {-0.559616, -0.847298}
    assert drawn.ids_B[500:].tolist() == [0, 0, 0]


def test_c27_probabilities() -> None:
    logits = np.log([0.40, 0.30, 0.15, 0.10, 0.05]).astype(np.float32)
    p_V = reference.probabilities(logits, Rule(top_k=3, top_p=0.80), 5)
    assert p_V.round(6).tolist() == [0.571429, 0.428571, 0, 0, 0]
    untouched = reference.probabilities(logits, Rule(), 5)
    for off in (Rule(top_k=-1), Rule(top_k=5), Rule(top_k=99), Rule(top_p=1.0), Rule(min_p=0.0)):
        assert (reference.probabilities(logits, off, 5) == untouched).all()


def test_every_step_of_the_law_by_hand() -> None:
    """Bias, repetition, presence, frequency, ban, temperature, min-p, in that order."""
    rule = Rule(
        temperature=2.0, min_p=0.2, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5,
        edits=edits((0, 1.0, 2, True), (1, -2.0, 0, True), (2, -np.inf, 0, False)),
    )  # fmt: skip
    logits = np.array([3.0, 1.0, 9.0, 0.0, 5.0, -3.0], dtype=np.float32)
    processed = reference.process(logits, rule, vocab_size=4)
    assert processed.tolist() == [(3 + 1) / 2 - 0.25 - 1.0, (1 - 2) * 2, -np.inf, 0.0, -np.inf, -np.inf]
    p_V = reference.probabilities(logits, rule, vocab_size=4)
    tempered = np.exp(np.array([0.375, -1.0, -np.inf, 0.0, -np.inf, -np.inf]))
    assert tempered[1] / tempered[0] > 0.2, "min-p looks at the tempered law, in which id 1 stays"
    assert p_V == pytest.approx(tempered / tempered.sum(), abs=1e-15)


@PATHS
def test_ties_at_a_cut_go_to_the_lower_id(sample: Sample) -> None:
    drawn = draw(
        sample, [[0.0] * 10] * 300, [Rule(top_k=3)] * 100 + [Rule(top_p=0.8)] * 100 + [Rule(temperature=0.0)] * 100
    )
    assert set(drawn.ids_B[:100].tolist()) == {0, 1, 2}
    assert set(drawn.ids_B[100:200].tolist()) == set(range(8))
    assert set(drawn.ids_B[200:].tolist()) == {0}


@PATHS
def test_c30_ids_beyond_the_tokenizer_are_masked(sample: Sample) -> None:
    drawn = draw(sample, [[0.0, 1.0, 50.0, np.nan]] * 100, [Rule()] * 99 + [Rule(temperature=0.0)], vocab_size=2)
    assert set(drawn.ids_B.tolist()) == {0, 1}
    assert {round(float(x), 6) for x in drawn.raw_logprobs_B} == {-1.313262, -0.313262}


@PATHS
def test_c30_by_number(sample: Sample) -> None:
    """Qwen3: 151,936 rows of which the tokenizer knows 151,669; the largest logit is that of id 151687."""
    logits = np.zeros(151_936, dtype=np.float32)
    logits[151_687], logits[7] = 50.0, 20.0
    drawn = draw(sample, [logits] * 2, [Rule(), Rule(temperature=0.0)], vocab_size=151_669)
    assert drawn.ids_B.tolist() == [7, 7]
    assert [round(float(x), 6) for x in drawn.logprobs_B] == [round(-np.log1p(151_668 * np.exp(-20.0)), 6)] * 2


@PATHS
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_bad_row_is_flagged_alone(sample: Sample, bad: float) -> None:
    for rule in (Rule(), Rule(temperature=0.0), Rule(top_k=1, edits=edits((0, 1.0, 1, True)))):
        drawn = draw(sample, [[1.0, 2.0], [1.0, bad], [3.0, 1.0]], [Rule(), rule, Rule()])
        assert (drawn.ids_B < 0).tolist() == [False, True, False]
        assert np.isnan(drawn.logprobs_B).tolist() == [False, True, False]


@PATHS
def test_a_row_with_every_id_banned_is_flagged(sample: Sample) -> None:
    rule = Rule(edits=edits((0, -np.inf, 0, False), (1, -np.inf, 0, False)))
    assert draw(sample, [[1.0, 2.0]], [rule]).ids_B.tolist() == [-1]


def random_rule(rng: np.random.Generator, vocab: int) -> Rule:
    ids = rng.choice(vocab, size=min(vocab - 1, 3), replace=False)
    some = Edits(
        ids, rng.choice([0.0, 1.0, -np.inf], size=len(ids)), rng.integers(0, 3, len(ids)), rng.random(len(ids)) < 0.5
    )
    return Rule(
        temperature=float(rng.choice([1.0, 0.7, 1.3, 0.0])),
        top_k=int(rng.choice([0, 1, 5, 40])),
        top_p=float(rng.choice([1.0, 0.9, 0.5])),
        min_p=float(rng.choice([0.0, 0.1])),
        repetition_penalty=float(rng.choice([1.0, 1.2])),
        presence_penalty=float(rng.choice([0.0, 0.5])),
        frequency_penalty=float(rng.choice([0.0, -0.5])),
        edits=some if rng.random() < 0.5 else NO_EDITS,
    )


@pytest.mark.parametrize("vocab", [3, 7, 50, 366, 4096])
def test_cpu_equals_the_reference(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for turn in range(30):
        logits = rng.normal(size=(8, vocab)) * rng.choice([0.1, 1.0, 4.0])
        logits = np.round(logits) if turn % 3 == 0 else logits  # many ties
        rules = [random_rule(rng, vocab) for _ in range(8)]
        seeds, positions = rng.integers(0, 2**63, 8), rng.integers(0, 10_000, 8)
        vocab_size = vocab - turn % 2
        expected = draw(reference.sample, logits, rules, seeds, positions, vocab_size)
        found = draw(cpu.sample, logits, rules, seeds, positions, vocab_size)
        assert found.ids_B.tolist() == expected.ids_B.tolist()
        for column, wanted in zip(found[1:], expected[1:], strict=True):
            np.testing.assert_allclose(column, wanted, atol=1e-12, rtol=0)


def test_c29_a_row_does_not_know_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(33, 366))
    rules = [random_rule(rng, 366) for _ in range(33)]
    seeds, positions = rng.integers(0, 2**63, 33), rng.integers(0, 1000, 33)
    together = draw(cpu.sample, logits, rules, seeds, positions)
    monkeypatch.setattr(compiled, "SPREAD_ABOVE_NANOSECONDS", 0)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    for order in (np.arange(33)[::-1], rng.permutation(33), np.array([7]), np.arange(3, 10)):
        some = draw(cpu.sample, logits[order], [rules[row] for row in order], seeds[order], positions[order])
        for column, whole in zip(some, together, strict=True):
            assert column.tobytes() == whole[order].tobytes()


def test_draws_follow_the_law() -> None:
    """Chi-square of 200,000 draws of a toy law with 5 of 6 ids kept; 4 degrees of freedom, 14.86 is the 0.005 point."""
    rule, logits, draws = Rule(temperature=0.9, top_p=0.97), np.array([1.0, 0.5, 0.0, -0.5, -1.0, -2.5]), 200_000
    law = reference.probabilities(logits.astype(np.float32), rule, 6)
    assert (law > 0).tolist() == [True] * 5 + [False]
    positions = np.arange(draws) % 1000
    drawn = draw(cpu.sample, np.tile(logits, (draws, 1)), [rule] * draws, np.arange(draws) // 1000, positions)
    observed = np.bincount(drawn.ids_B, minlength=6)
    assert observed[5] == 0
    chi_square = float(((observed[:5] - law[:5] * draws) ** 2 / (law[:5] * draws)).sum())
    assert chi_square < 14.86


@pytest.mark.parametrize("vocab", [3, 7, 50, 4096])
def test_scores_on_the_cpu_equal_the_reference(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for turn in range(30):
        logits = (rng.normal(size=(8, vocab)) * rng.choice([0.1, 1.0, 4.0])).astype(np.float32)
        logits = np.round(logits) if turn % 3 == 0 else logits  # many ties
        rules = Rules.of([random_rule(rng, vocab) for _ in range(8)])
        ids, count = rng.integers(0, vocab, 8), min(vocab, 5)
        expected, found = (
            module.score(logits, vocab - 1, rules, ids % (vocab - 1), count) for module in (reference, cpu)
        )
        assert found.top_ids_BK.tolist() == expected.top_ids_BK.tolist()
        assert found.top_logprobs_BK == pytest.approx(expected.top_logprobs_BK, abs=1e-11)
        assert found.logprobs_B == pytest.approx(expected.logprobs_B, abs=1e-11, nan_ok=True)


@pytest.mark.parametrize("module", [reference, cpu])
def test_a_score_is_what_sampling_recorded(module: Any) -> None:
    rng = np.random.default_rng(5)
    logits, rules = rng.normal(size=(40, 50)).astype(np.float32), Rules.of([random_rule(rng, 50) for _ in range(40)])
    drawn = module.sample(logits, 50, rules, np.arange(40, dtype=np.uint64), np.zeros(40, dtype=np.int64))
    assert module.score(logits, 50, rules, drawn.ids_B).logprobs_B == pytest.approx(
        drawn.logprobs_B, abs=1e-11, nan_ok=True
    )


@pytest.mark.parametrize("module", [reference, cpu])
def test_the_most_likely_ids_under_the_law(module: Any) -> None:
    """Tempered, cut and renormalised; at temperature 0 untempered and uncut; the lower id first; -1 where nothing is left."""
    logits = np.log([[0.10, 0.40, 0.15, 0.05, 0.30], [0.25, 0.25, 0.25, 0.25, 1e-30], [np.nan] * 5] * 2)
    cut, greedy = Rule(top_k=3, top_p=0.80), Rule(temperature=0.0, top_k=1)
    rules = Rules.of([cut] * 3 + [greedy] * 3)
    scored = module.score(logits.astype(np.float32), 5, rules, np.array([1, 3, 0, 0, 3, 0]), 4)
    assert scored.top_ids_BK.tolist() == [
        [1, 4, -1, -1], [0, 1, 2, -1], [-1] * 4, [1, 4, 2, 0], [0, 1, 2, 3], [-1] * 4
    ]  # fmt: skip
    inf = -np.inf
    assert scored.top_logprobs_BK[0].round(6).tolist() == [-0.559616, -0.847298, inf, inf]
    assert scored.top_logprobs_BK[3] == pytest.approx(np.log([0.4, 0.3, 0.15, 0.1]))
    assert scored.logprobs_B[[1, 3]].round(6).tolist() == [inf, -2.302585]
    assert np.isnan(scored.logprobs_B[[2, 5]]).all()
