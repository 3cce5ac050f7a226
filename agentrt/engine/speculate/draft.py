"""`Draft`: ids proposed to follow a sequence, and what they were drawn from."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Draft(NamedTuple):
    """Ids that may come next. Nothing of it is in the sequence before a verifier says so."""

    ids: tuple[int, ...] = ()
    q: tuple[Floats, ...] = ()
    """The distribution that each id was *drawn* from, cuts included. Empty if the ids were chosen and not drawn: then q is 1
    at the id, whatever probability a model gave it."""
    kind: str = ""
    """Drafts that are accepted alike have one kind: who proposed it, and what it saw *before* it chose the ids."""

    def cut(self, length: int) -> "Draft":
        """Its first `length` ids."""
        return self._replace(ids=self.ids[:length], q=self.q[:length])

    def q_at(self, depth: int, vocab_size: int) -> Floats:
        """The distribution of `ids[depth]`."""
        if self.q:
            return self.q[depth]
        one_hot_V = np.zeros(vocab_size)
        one_hot_V[self.ids[depth]] = 1.0
        return one_hot_V


NO_DRAFT = Draft()
