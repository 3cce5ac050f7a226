"""The rows of a group as one tree of tokens: what they have in common is there, and is computed by a trainer, once.

The members of a group begin with the same prompt, and a policy that is sure of itself often goes on alike. A node of the
tree is an id in its context, so all rows that have the same ids up to a place share the node there. A causal model over
the tree, in which a node attends itself and its ancestors, gives every row the logits that it would have alone, and one
backward pass the gradient of all rows. Numpy; imports no torch.

Suffixes: N nodes, S sampled tokens of all rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrt.rollout.batch import Row, ragged

NO_PARENT = -1


class Tree(NamedTuple):
    """Nodes, parents before children; and each sampled token of each row, also where rows share the node."""

    token_ids_N: NDArray[np.int64]
    positions_N: NDArray[np.int64]
    """In the rows that a node belongs to."""
    attends_NN: NDArray[np.bool_]
    """The attention mask: True where the second node is the first one or an ancestor of it."""
    before_S: NDArray[np.int64]
    """The node whose logits a token was sampled from."""
    sampled_S: NDArray[np.int64]
    """The token's id."""
    logprobs_S: NDArray[np.float32]
    """As recorded; rows that share a node may have been sampled by different policies."""
    versions_S: NDArray[np.int32]
    advantages_S: NDArray[np.float32]
    """That of the token's row."""


def tree_of(rows: Sequence[Row]) -> Tree:
    """The tree of some rows, best of one group; several trees side by side if their first ids differ.

    `ValueError` for a row without an advantage.
    """
    flat, nodes, parents = ragged(rows), dict[tuple[int, int], int](), list[int]()
    before = list[int]()
    for row in rows:
        node = NO_PARENT
        for token in row.token_ids:
            before.append(node)
            node = nodes.setdefault((node, token), len(nodes))
            if node == len(parents):
                parents.append(before[-1])
    sampled = flat.mask_N
    before_S = np.array(before, dtype=np.int64)[sampled]
    assert NO_PARENT not in before_S, "the first id of a row is observed"
    return Tree(
        np.array([token for _, token in nodes], dtype=np.int64), *_places(parents), before_S, flat.token_ids_N[sampled],
        flat.logprobs_N[sampled], flat.versions_N[sampled],
        np.repeat(flat.advantages_R, np.diff(flat.starts))[sampled],
    )  # fmt: skip


def _places(parents: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The position of each node and what it attends."""
    positions_N = np.zeros(len(parents), dtype=np.int64)
    attends_NN = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent != NO_PARENT:
            positions_N[node] = positions_N[parent] + 1
            attends_NN[node] |= attends_NN[parent]
    return positions_N, attends_NN
