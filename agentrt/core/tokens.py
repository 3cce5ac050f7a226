"""`Tokens`: the append-only id list of one branch, with mask, logprob and policy version of each id.

The arrays are typed and parallel: 13 bytes a token. What the policy sampled has mask 1; everything else (prompt, template
text, tool output) has mask 0, logprob 0.0 and version -1. Nothing here removes or rewrites an id: a rewritten history is
another branch.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

NOT_SAMPLED = -1
"""The version of an id that no policy sampled."""
MOST_VERSION = 2**31 - 1
"""The greatest version that can be recorded with an id."""

if TYPE_CHECKING:
    IntArray = array[int]
    FloatArray = array[float]
else:
    IntArray = FloatArray = array


class Ids(IntArray):
    """Token ids or versions: 32-bit integers."""

    __slots__ = ()

    def __new__(cls, items: Iterable[int] = ()) -> "Ids":
        return cast(Ids, array.__new__(cls, "i", items))


class Mask(IntArray):
    """Loss mask: 1 exactly on what the policy sampled; 8-bit integers."""

    __slots__ = ()

    def __new__(cls, items: Iterable[int] = ()) -> "Mask":
        return cast(Mask, array.__new__(cls, "b", items))


class Floats(FloatArray):
    """Logprobs: 32-bit floats."""

    __slots__ = ()

    def __new__(cls, items: Iterable[float] = ()) -> "Floats":
        return cast(Floats, array.__new__(cls, "f", items))


class Tokens:
    """One branch's parallel arrays; they always have equal length."""

    __slots__ = ("logprobs", "mask", "token_ids", "versions")

    def __init__(self) -> None:
        self.token_ids, self.mask, self.logprobs, self.versions = Ids(), Mask(), Floats(), Ids()

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"<Tokens {len(self)} ids, {self.num_sampled} sampled>"

    @property
    def num_sampled(self) -> int:
        """How many ids the policy sampled."""
        return self.mask.count(1)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append ids that the policy did not sample."""
        count = len(token_ids)
        self.token_ids.extend(token_ids if isinstance(token_ids, Ids) else Ids(token_ids))  # an array is copied at once
        self.mask.frombytes(bytes(count))  # much faster than from lists of equal numbers
        self.logprobs.frombytes(bytes(count * self.logprobs.itemsize))
        self.versions.frombytes(b"\xff" * (count * self.versions.itemsize))  # NOT_SAMPLED

    def commit(self, token_id: int, logprob: float, version: int) -> None:
        """Append one id that policy `version` sampled with `logprob`."""
        self.token_ids.append(token_id)
        self.mask.append(1)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def commit_all(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append ids that policy `version` sampled with `logprobs`, as many."""
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} ids and {len(logprobs)} logprobs")
        self.token_ids.extend(token_ids)
        self.mask.frombytes(b"\1" * len(token_ids))
        self.logprobs.extend(logprobs)
        self.versions.frombytes(version.to_bytes(self.versions.itemsize, sys.byteorder) * len(token_ids))

    def copy(self, start: int = 0) -> "Tokens":
        """A new object with the arrays from `start` on, as far as all of them are while another thread appends to them."""
        other, own = Tokens(), slice(start, len(self.versions))  # which are appended last
        other.token_ids, other.mask = Ids(self.token_ids[own]), Mask(self.mask[own])
        other.logprobs, other.versions = Floats(self.logprobs[own]), Ids(self.versions[own])
        return other
