"""`Draft`: ids proposed to follow a sequence, as a tree, and what they were drawn from. A chain is a tree with one branch.

An id is known by its place in the draft; -1 stands for the sequence's last id, which the first ids follow. The model
computes a *row* after each: row 0 after the sequence's last id, row i + 1 after id i.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Branch(NamedTuple):
    """Ids of a draft that follow one another. Each lies in one branch."""

    ids: list[int]
    """Their places. The first branch, which goes on from the sequence's last id, may have none."""
    above: list[int]
    """The ids before them, from the first of the draft on."""
    parent: int
    """The branch that it leaves; -1 for the first."""


class Draft(NamedTuple):
    """Ids that may come next. Nothing of it is in the sequence before a verifier says so."""

    ids: tuple[int, ...] = ()
    """Each behind the one that it follows. The first few of them are a draft as well."""
    q: tuple[Floats, ...] = ()
    """The distribution that each id was *drawn* from, cuts included. Empty if the ids were chosen and not drawn: then q is 1
    at the id, whatever probability a model gave it."""
    kind: str = ""
    """Drafts that are accepted alike have one kind: who proposed it, and what it saw *before* it chose the ids."""
    parents: tuple[int, ...] = ()
    """The id that each follows. Empty for a chain: each follows the one before it."""

    def cut(self, length: int) -> "Draft":
        """Its first `length` ids."""
        return self._replace(ids=self.ids[:length], q=self.q[:length], parents=self.parents[:length])

    def ordered(self, order: Sequence[int]) -> "Draft":
        """The same ids in this order, in which each is behind the one that it follows."""
        place_of = {-1: -1, **{old: new for new, old in enumerate(order)}}
        ids, parents = zip(*((self.ids[old], place_of[self.parents[old]]) for old in order), strict=True)
        return self._replace(ids=ids, parents=parents, q=tuple(self.q[old] for old in order) if self.q else ())

    def q_at(self, place: int, vocab_size: int) -> Floats:
        """The distribution of `ids[place]`."""
        if self.q:
            return self.q[place]
        one_hot_V = np.zeros(vocab_size)
        one_hot_V[self.ids[place]] = 1.0
        return one_hot_V

    def after(self, place: int) -> list[int]:
        """The ids that may follow this one, the first choice first."""
        if not self.parents:
            return [place + 1] if place + 1 < len(self.ids) else []
        return [other for other, parent in enumerate(self.parents) if parent == place]

    def follow(self, place: int, token_id: int) -> int:
        """Where this id follows the one at `place`; -1 if it does not."""
        if not self.parents:
            place += 1
            return place if place < len(self.ids) and self.ids[place] == token_id else -1
        return next((other for other in self.after(place) if self.ids[other] == token_id), -1)

    def walk(self, token_ids: Iterable[int]) -> list[int]:
        """The ids of the draft that these are, one after another, until there is none."""
        found, place = list[int](), -1
        for token_id in token_ids:
            if (place := self.follow(place, token_id)) < 0:
                break
            found.append(place)
        return found

    def path(self, row: int) -> list[int]:
        """The ids before this row, from the first of the draft on."""
        if not self.parents:
            return list(range(row))
        found, place = list[int](), row - 1
        while place >= 0:
            found.append(place)
            place = self.parents[place]
        return found[::-1]

    def branches(self) -> list[Branch]:
        """An id goes on with the branch of the one that it follows, unless another did so before it."""
        if not self.parents:
            return [Branch(list(range(len(self.ids))), [], -1)]
        found, ends, branch_of = [Branch([], [], -1)], [-1], {-1: 0}
        for place, parent in enumerate(self.parents):
            branch = branch_of[parent]
            if ends[branch] != parent:
                found.append(Branch([], self.path(parent + 1), branch))
                ends.append(place)
                branch = len(found) - 1
            found[branch].ids.append(place)
            ends[branch], branch_of[place] = place, branch
        return found

    def first(self) -> "Draft":
        """Its first branch, a chain."""
        if not self.parents:
            return self
        places = self.branches()[0].ids
        q = tuple(self.q[place] for place in places) if self.q else ()
        return self._replace(ids=tuple(self.ids[place] for place in places), q=q, parents=())

    def order(self) -> list[int]:
        """Its ids branch by branch: so their rows lie in a batch."""
        return [place for branch in self.branches() for place in branch.ids]


NO_DRAFT = Draft()
