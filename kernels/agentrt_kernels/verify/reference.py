"""Which drafted ids stand: sample-then-compare over chains and trees, the definition.

A sequence's nodes are neighbours. Its first one is its last committed id; every other is a drafted id after its parent.
At each node the target model's law has been sampled once, by the ordinary sampler (`sampled_N`: the id after the node).
From the first node on, the sampled id is committed, and the walk goes on from the child that drafted the same id, until
there is none. So what is committed is what would have been sampled without drafts. A chain is a tree in which each
node's parent is the node before it.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Verified(NamedTuple):
    """Suffixes: S sequences, W the most nodes that a walk may have."""

    counts_S: Tensor
    """Ids committed, at least 1; int32."""
    nodes_SW: Tensor
    """The nodes of the walk, then -1; int32. The committed ids are those sampled at them."""


def verify(drafted_N: Tensor, sampled_N: Tensor, parents_N: Tensor, starts_T: Tensor, longest: int) -> Verified:
    """`starts_T` is where each sequence's nodes begin, and behind the last their number; `longest` is W.

    A node stands behind its parent (`parents_N`, -1 for a first node). Of two children with the same id the first one
    counts. An id below 0 stands for none: it matches nothing, and a walk ends where -1 was sampled.
    """
    drafted, sampled, parents, starts = (t.tolist() for t in (drafted_N, sampled_N, parents_N, starts_T))
    walks = []
    for start, stop in pairwise(starts):
        walk = [start]
        for node in range(start + 1, stop):
            if len(walk) < longest and parents[node] == walk[-1] and drafted[node] == sampled[walk[-1]] >= 0:
                walk.append(node)
        walks.append(walk)
    nodes_SW = torch.full((len(walks), longest), -1, dtype=torch.int32)
    for row, walk in enumerate(walks):
        nodes_SW[row, : len(walk)] = torch.tensor(walk, dtype=torch.int32)
    counts_S = torch.tensor([len(walk) for walk in walks], dtype=torch.int32)
    return Verified(counts_S.to(sampled_N.device), nodes_SW.to(sampled_N.device))
