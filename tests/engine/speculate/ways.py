"""Adds up every way through a program that asks for chance: its exact law, without a single random number."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np

from agentrt.engine.speculate.draft import Floats

T = TypeVar("T", bound=Hashable)


class Way:
    """A `Chance` that takes given branches, then the first of each; notes the others and how likely it was itself."""

    def __init__(self, given: tuple[int, ...]) -> None:
        self.probability = 1.0
        self.others: list[tuple[int, ...]] = []
        self._given, self._path = given, []  # type: tuple[int, ...], list[int]

    def accepts(self, p: float, q: float) -> bool:
        accepted = min(1.0, p / q)
        return self.draws(np.array([1.0 - accepted, accepted])) == 1

    def draws(self, weights_V: Floats) -> int:
        if len(self._path) < len(self._given):
            branch = self._given[len(self._path)]
        else:
            branch, *others = np.flatnonzero(weights_V).tolist()
            self.others += [(*self._path, other) for other in others]
        self._path.append(branch)
        self.probability *= float(weights_V[branch] / weights_V.sum())
        return branch


def law_of(program: Callable[[Way], T]) -> dict[T, float]:
    """The probability of each result."""
    found: dict[T, float] = defaultdict(float)
    todo: list[tuple[int, ...]] = [()]
    while todo:
        way = Way(todo.pop())
        found[program(way)] += way.probability
        todo += way.others
    return dict(found)
