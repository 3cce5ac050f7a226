"""Verifiers: which ids of a draft the policy takes, and what it samples where it stops. Pure, and exact.

`law(row)` is p, the one law after the sequence's last id (row 0) or after id `row - 1` of the draft, its processors
evaluated on a history that holds the ids of the draft down to that one. Each verifier returns the ids to commit: those it
took of the draft, and one more that the draft did not give. Their joint distribution is that of sampling one id after
another, for any draft; `tests/engine/speculate` adds up every way through each of them.

- `coupled` samples the next id as always, then looks whether the draft had it, and goes on from there. With noise keyed by
  position, the ids are the same with speculation on and off, for every proposer.
- `rejection` takes d with probability min(1, p(d) / q(d)), else draws from the residual (Leviathan et al. 2023, Chen et
  al. 2023), where there are several in turn (Miao et al. 2024). It takes more of drafts that were drawn; for chosen
  ones (q one-hot) it takes exactly as many. Ids that follow the same one are chosen, or drawn independently.
- `block` judges prefixes of a chain instead of single ids (Sun et al. 2024): never worse in expectation.

The last two need the q that an id was really drawn from, and chance that nobody has used before: neither the proposer, nor an
earlier verification of the same position.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from agentrt.core.seeds import derive
from agentrt.engine.speculate.draft import Draft, Floats

Law = Callable[[int], Floats]


class Chance(Protocol):
    """Where a verifier's and a proposer's chance comes from."""

    def accepts(self, p: float, q: float) -> bool:
        """True with probability min(1, p / q); never for p = 0, always for p >= q > 0."""

    def draws(self, weights_V: Floats) -> int:
        """An id, each with a probability in proportion to its weight."""


class KeyedChance:
    """Chance that depends on a seed and a path only, so a verification can be repeated."""

    def __init__(self, seed: int, *path: str | int) -> None:
        self._random = np.random.default_rng(derive(seed, *path))

    def accepts(self, p: float, q: float) -> bool:
        return self._random.random() * q < p  # the uniform may be 0, never 1

    def draws(self, weights_V: Floats) -> int:
        kept = np.flatnonzero(weights_V)
        return int(kept[np.argmax(weights_V[kept] / self._random.standard_exponential(len(kept)))])


def coupled(draft: Draft, choose: Callable[[int], int]) -> list[int]:
    """`choose(row)` samples from `law(row)`; it is asked only where all ids of the draft before were chosen."""
    chosen, place = [choose(0)], -1
    while (place := draft.follow(place, chosen[-1])) >= 0:
        chosen.append(choose(place + 1))
    return chosen


def rejection(draft: Draft, law: Law, chance: Chance) -> list[int]:
    """Accept an id with min(1, p/q); where one is rejected, p is norm((p - q)+) from then on. After the last, an id of p."""
    taken, p_V, following = list[int](), law(0), draft.after(-1)
    while following:
        place = following.pop(0)
        q_V, proposed = draft.q_at(place, len(p_V)), draft.ids[place]
        if chance.accepts(p_V[proposed], q_V[proposed]):
            taken.append(proposed)
            p_V, following = law(place + 1), draft.after(place)
        else:
            rest_V = residual(p_V, q_V)
            p_V = rest_V / rest_V.sum()
    return [*taken, chance.draws(p_V)]


def block(draft: Draft, law: Law, chance: Chance) -> list[int]:
    """Accept the longest prefix whose coin says so. With w the product of the ratios p/q, each step capped at 1, and

        R = sum((w * p - q)+),  h = R / (R + 1 - w)  after part of the draft,  h = w  after all of it,

    a prefix is kept with probability h, and then an id comes from norm((w * p - q)+), or from p after all of it.
    """
    kept, weight, rest_V = 0, 1.0, residual(law(0), draft.q_at(0, len(law(0)))) if draft.ids else law(0)
    for depth, proposed in enumerate(draft.ids, start=1):
        p_V = law(depth - 1)
        q_V = draft.q_at(depth - 1, len(p_V))
        weight = min(1.0, weight * p_V[proposed] / q_V[proposed])
        after_V = law(depth)
        if depth == len(draft.ids):
            mass, next_V, out_of = weight, after_V, 1.0
        else:
            left_V = np.maximum(weight * after_V - draft.q_at(depth, len(after_V)), 0.0)
            mass, next_V = float(left_V.sum()), left_V
            out_of = mass + 1.0 - weight
        if mass > 0 and chance.accepts(mass, out_of):
            kept, rest_V = depth, next_V
    return [*draft.ids[:kept], chance.draws(rest_V)]


def residual(p_V: Floats, q_V: Floats) -> Floats:
    """What p has more than q, as weights; p itself where rounding leaves nothing."""
    left_V = np.maximum(p_V - q_V, 0.0)
    return left_V if left_V.any() else p_V
