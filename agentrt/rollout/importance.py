"""Importance weights: what makes up for a sampler that is not quite the policy that is trained.

A token was sampled with probability exp(r) (the recorded logprob) and the trainer's model gives it exp(t): another
version of the weights, quantised weights, other kernels. The loss of a token is multiplied by a weight that is treated
as a constant. Both logprobs must be of one law: the same temperature, and the same kept set under top-k and top-p.

The functions take numpy arrays or torch tensors of one shape (detach what has a gradient) and return the same kind;
rows are along the first axis, tokens along the last. The log ratio is clamped to ±20 before exp.

    token      w_t = min(exp(t_t - r_t), C)                          truncated importance sampling (TIS)
    banded     w_t = exp(t_t - r_t) if it is in [1/C, C], else 0     masked importance sampling
    sequence   w = min(exp(mean_t (t_t - r_t)), C)                   one weight a row, the geometric mean of its tokens
    veto       w = 0 if any exp(t_t - r_t) < floor, else 1           drops rows that the policy would never have sampled

Sources: FlashRL (TIS), IcePop (banded), GSPO (the geometric mean of a sequence), and for the veto the rollout correction
of verl.
"""

from typing import Any, TypeVar

import numpy as np

Array = TypeVar("Array", bound=Any)

LOG_RATIO_CLAMP = 20.0
FAR = 1e30


def token_weights(trainer: Array, sampler: Array, cap: float = 2.0) -> Array:
    """w = min(exp(trainer - sampler), cap) for each token."""
    weights: Array = ratio(trainer, sampler).clip(max=_above_zero(cap))
    return weights


def banded_weights(trainer: Array, sampler: Array, cap: float = 2.0) -> Array:
    """exp(trainer - sampler) for each token where that is within [1 / cap, cap], else 0."""
    weights = ratio(trainer, sampler)
    banded: Array = weights * (weights <= _above_zero(cap)) * (weights >= 1 / cap)
    return banded


def sequence_weights(trainer: Array, sampler: Array, mask: Array, cap: float = 2.0) -> Array:
    """min(exp(mean of trainer - sampler over the masked tokens), cap) for each row, shape (rows, 1)."""
    count = mask.sum(-1).clip(min=1)
    # An id that nobody sampled may be one that the law cuts: infinitely far, which times 0 is no number.
    mean = ((trainer - sampler).clip(-FAR, FAR) * mask).sum(-1) / count
    weights: Array = ratio(mean, mean * 0).clip(max=_above_zero(cap))[..., None]
    return weights


def veto(trainer: Array, sampler: Array, mask: Array, floor: float = 1e-4) -> Array:
    """0 for each row in which a masked token has a ratio below `floor`, else 1; shape (rows, 1)."""
    is_far = (ratio(trainer, sampler) < floor) * (mask != 0)
    kept: Array = 1.0 - (is_far.sum(-1) > 0)[..., None] * 1.0
    return kept


def ratio(trainer: Array, sampler: Array) -> Array:
    """exp(trainer - sampler), the difference clamped to ±20."""
    difference = (trainer - sampler).clip(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    exponential: Array = difference.exp() if hasattr(difference, "exp") else np.exp(difference)
    return exponential


def _above_zero(cap: float) -> float:
    if not cap > 0:
        raise ValueError(f"cap must be above 0, not {cap}; 2 is usual")
    return cap
