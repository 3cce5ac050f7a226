"""Rows for a trainer, and the two forms in which many of them make a batch: padded and ragged. Numpy; imports no torch.

A row is one branch of an episode, whole: a fork has the ids that it shares before its own, with mask 0, so no token is
trained on twice. Arrays that belong together have the same shape everywhere: ids, mask, logprobs, versions.

Suffixes: R rows, T tokens of the longest row, N tokens of all rows.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from agentrt.core.records import BranchRecord, EpisodeRecord, joined
from agentrt.core.tokens import NOT_SAMPLED, Floats, Ids, Mask, Tokens

Number = TypeVar("Number", bound=np.generic)


class Row(NamedTuple):
    """One branch. The arrays are parallel."""

    task_id: str
    member: int
    branch: str
    token_ids: Ids
    mask: Mask
    """1 exactly on what this branch sampled."""
    logprobs: Floats
    """Under the law sampled from; 0 where the mask is."""
    versions: Ids
    """The policy that sampled each id; -1 where the mask is 0."""
    advantage: float | None
    """None for an episode that has no reward."""

    @property
    def prompt_length(self) -> int:
        """Ids before the first sampled one."""
        return self.mask.index(1) if 1 in self.mask else len(self.mask)


class Padded(NamedTuple):
    """Rows of equal length, filled up at the end with the pad id, mask 0, logprob 0 and version -1."""

    token_ids_RT: NDArray[np.int64]
    is_token_RT: NDArray[np.bool_]
    """False on padding: the attention mask."""
    mask_RT: NDArray[np.bool_]
    logprobs_RT: NDArray[np.float32]
    versions_RT: NDArray[np.int32]
    advantages_R: NDArray[np.float32]


class Ragged(NamedTuple):
    """Rows one after another, as attention over packed sequences takes them; row r is `starts[r]` to `starts[r + 1]`."""

    token_ids_N: NDArray[np.int64]
    mask_N: NDArray[np.bool_]
    logprobs_N: NDArray[np.float32]
    versions_N: NDArray[np.int32]
    advantages_R: NDArray[np.float32]
    starts: NDArray[np.int32]
    """One more than there are rows; the last is N."""


def row_of(record: EpisodeRecord, branch: BranchRecord, advantage: float | None) -> Row:
    """A branch of an episode as a row."""
    tokens, shared = joined(record, branch), branch.fork.at if branch.fork else 0
    own = Tokens()
    own.observe(tokens.token_ids[:shared])
    for name in Tokens.__slots__:
        getattr(own, name).extend(getattr(tokens, name)[shared:])
    return Row(
        record.task_id, record.member, branch.name, own.token_ids, own.mask, own.logprobs, own.versions, advantage
    )  # fmt: skip


def padded(rows: Sequence[Row], pad_id: int = 0) -> Padded:
    """One array a field, as wide as the longest row. `ValueError` for a row without an advantage."""
    lengths_R = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    is_token_RT = np.arange(lengths_R.max(initial=0)) < lengths_R[:, None]

    def filled(values: NDArray[Number], fill: int) -> NDArray[Number]:
        array = np.full(is_token_RT.shape, fill, dtype=values.dtype)
        array[is_token_RT] = values
        return array

    flat = ragged(rows)
    return Padded(
        filled(flat.token_ids_N, pad_id), is_token_RT, filled(flat.mask_N, 0), filled(flat.logprobs_N, 0),
        filled(flat.versions_N, NOT_SAMPLED), flat.advantages_R,
    )  # fmt: skip


def ragged(rows: Sequence[Row]) -> Ragged:
    """The rows one after another. `ValueError` for a row without an advantage."""
    for row in rows:
        if row.advantage is None:
            raise ValueError(f"{row.task_id}, member {row.member} has no advantage, so nothing can be learned from it")
    return Ragged(
        np.array([i for row in rows for i in row.token_ids], dtype=np.int64),
        np.array([bit for row in rows for bit in row.mask], dtype=np.bool_),
        np.array([p for row in rows for p in row.logprobs], dtype=np.float32),
        np.array([v for row in rows for v in row.versions], dtype=np.int32),
        np.array([row.advantage for row in rows], dtype=np.float32),
        np.cumsum([0, *(len(row.token_ids) for row in rows)], dtype=np.int32),
    )
