"""Importance weights by hand, on numpy arrays and torch tensors alike."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agentrt.rollout.importance import banded_weights, ratio, sequence_weights, token_weights, veto

SAMPLER = [[-1.0, -1.0, -1.0, 0.0], [-2.0, -2.0, 0.0, 0.0]]
TRAINER = [[-1.0, -1.0 + math.log(1.5), -1.0 + math.log(4), 5.0], [-2.0 - math.log(4), -2.0 - math.log(1e5), 0.0, 0.0]]
MASK = [[1, 1, 1, 0], [1, 1, 0, 0]]

numpy_or_torch = pytest.mark.parametrize("array", [np.array, torch.tensor], ids=["numpy", "torch"])


@numpy_or_torch
def test_each_weight_by_hand(array: Callable[[Any], Any]) -> None:
    trainer, sampler, mask = array(TRAINER), array(SAMPLER), array(MASK)
    np.testing.assert_allclose(token_weights(trainer, sampler)[0, :3], [1, 1.5, 2], rtol=1e-6)
    np.testing.assert_allclose(token_weights(trainer, sampler)[1, :2], [0.25, 1e-5], rtol=1e-5)
    np.testing.assert_allclose(banded_weights(trainer, sampler)[0, :3], [1, 1.5, 0], rtol=1e-6)
    np.testing.assert_allclose(banded_weights(trainer, sampler)[1, :2], [0, 0], rtol=1e-6)
    expected = [[6 ** (1 / 3)], [(0.25 * 1e-5) ** 0.5]]
    np.testing.assert_allclose(sequence_weights(trainer, sampler, mask), expected, rtol=1e-5)
    assert sequence_weights(trainer, sampler, mask, cap=1.1)[0].tolist() == pytest.approx([1.1])
    assert veto(trainer, sampler, mask).tolist() == [[1.0], [0.0]]
    assert type(token_weights(trainer, sampler)) is type(trainer)


@numpy_or_torch
def test_on_policy_is_one_and_far_off_is_finite(array: Callable[[Any], Any]) -> None:
    same = array([[-0.5, -1e9]])
    assert token_weights(same, same).tolist() == [[1.0, 1.0]]
    assert veto(same, same, same * 0 + 1).tolist() == [[1.0]]
    assert ratio(array([0.0]), array([-1e9])).tolist() == pytest.approx([math.exp(20)])
    assert sequence_weights(same, same, same * 0).tolist() == [[1.0]]


@numpy_or_torch
def test_what_the_law_cuts_where_nothing_was_sampled_is_not_looked_at(array: Callable[[Any], Any]) -> None:
    """Minus infinity times a mask of 0 is no number, and made the weight of the whole row none."""
    trainer, sampler, mask = array([[-math.inf, -1.0, -2.0]]), array([[0.0, -1.0, -1.0]]), array([[0, 1, 1]])
    assert sequence_weights(trainer, sampler, mask).tolist() == [[pytest.approx(math.exp(-0.5))]]
    assert veto(trainer, sampler, mask).tolist() == [[1.0]]
    assert sequence_weights(trainer, sampler, mask * 0 + 1).tolist() == [[pytest.approx(math.exp(-20))]]


@pytest.mark.parametrize("weights", [token_weights, banded_weights])
def test_a_cap_of_nothing_is_refused(weights: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="cap must be above 0"):
        weights(np.zeros(1), np.zeros(1), cap=0.0)
