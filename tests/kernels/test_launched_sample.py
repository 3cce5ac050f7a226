"""The sampling law's Triton kernels: the reference's ids, and its numbers to 1e-12."""

import numpy as np
import pytest
import torch

from agentrt_kernels.sample import launch, reference
from agentrt_kernels.sample.rules import NO_EDITS, Drawn, Edits, Rule, Rules

# numpy, by which the interpreter computes, says so where a bad row's NaN is compared or an empty row's sum is divided.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")


def draw(
    device: str, logits_BV: object, rules: list[Rule], positions: object = None, vocab_size: int = 0
) -> list[Drawn]:
    """What the reference and the kernels draw."""
    logits = np.array(logits_BV, dtype=np.float32)
    seeds = np.arange(len(logits), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    places = np.arange(len(logits), dtype=np.int64) if positions is None else np.array(positions, dtype=np.int64)
    law = (vocab_size or logits.shape[1], Rules.of(rules), seeds, places)
    return [reference.sample(logits, *law), launch.sample(torch.from_numpy(logits).to(device), *law)]


def check_same(drawn: list[Drawn]) -> None:
    assert drawn[1].ids_B.tolist() == drawn[0].ids_B.tolist()
    for found, expected in zip(drawn[1][1:], drawn[0][1:], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-12, rtol=0)


RULES = [
    Rule(),
    Rule(temperature=0.0),
    Rule(temperature=0.7, top_k=5),
    Rule(top_p=0.5),
    Rule(temperature=1.3, min_p=0.1, top_k=40, top_p=0.9),
    Rule(top_k=3, top_p=0.8, edits=Edits(np.array([1, 4]), np.array([1.0, -np.inf]), np.array([2, 0]), np.array([True, False])),
         repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5),
]  # fmt: skip


@pytest.mark.parametrize("vocab", [7, 1500])
@pytest.mark.parametrize("ties", [False, True])
def test_launch_equals_the_reference(device: str, vocab: int, ties: bool) -> None:
    rng = np.random.default_rng(vocab)
    logits_BV = rng.normal(size=(len(RULES), vocab)) * 2
    check_same(draw(device, np.round(logits_BV) if ties else logits_BV, RULES, vocab_size=vocab - 1))


def test_ties_at_a_cut_go_to_the_lower_id(device: str) -> None:
    rules = [Rule(top_k=3)] * 6 + [Rule(top_p=0.25)] * 6 + [Rule(temperature=0.0)] * 2
    drawn = draw(device, [[0.0] * 10] * 14, rules)
    check_same(drawn)
    assert set(drawn[1].ids_B[:12].tolist()) <= {0, 1, 2}
    assert drawn[1].ids_B[12:].tolist() == [0, 0]


def test_c26_c27_the_law_by_its_exact_values(device: str) -> None:
    rules = [Rule(temperature=0.5, top_k=2), Rule(top_k=3, top_p=0.80)]
    drawn = draw(device, [[2, 1, 0, -50, -50], np.log([0.40, 0.30, 0.15, 0.10, 0.05])], rules)[1]
    assert drawn.ids_B.tolist() == [0, 1]
    assert drawn.logprobs_B.round(6).tolist() == [-0.126928, -0.847298]
    assert drawn.kept_logmass_B.round(6).tolist()[0] == -0.016004


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_is_flagged_alone(device: str, bad: float) -> None:
    banned = Edits(np.array([0, 1]), np.full(2, -np.inf), np.zeros(2, int), np.zeros(2, bool))
    rules = [Rule(), Rule(top_k=1, top_p=0.5), Rule(edits=banned), Rule(edits=NO_EDITS)]
    drawn = draw(device, [[1.0, 2.0], [1.0, bad], [3.0, 1.0], [3.0, 1.0]], rules)
    assert (drawn[1].ids_B < 0).tolist() == [False, True, True, False]
    assert np.isnan(drawn[1].logprobs_B).tolist() == [False, True, True, False]
    assert drawn[1].ids_B.tolist() == drawn[0].ids_B.tolist()
