"""Speculative verify over chains and trees: the Triton kernel against the definition, and the definition by hand."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrt_kernels.verify import launch, reference
from agentrt_kernels.verify.reference import Verified

Verify = Callable[[Tensor, Tensor, Tensor, Tensor, int], Verified]
Tree = list[tuple[int, int, int]]


def run(verify: Verify, device: str, trees: list[Tree], longest: int) -> tuple[list[int], list[list[int]]]:
    """Trees of (parent within the tree, drafted, sampled)."""
    nodes = [(parent + first * (parent >= 0), drafted, sampled) for tree, first in zip(trees, _starts(trees), strict=False)
             for parent, drafted, sampled in tree]  # fmt: skip
    parents, drafted, sampled = (torch.tensor(column, device=device) for column in zip(*nodes, strict=True))
    starts_T = torch.tensor(_starts(trees), dtype=torch.int32, device=device)
    verified = verify(drafted, sampled, parents.int(), starts_T, longest)
    return verified.counts_S.tolist(), verified.nodes_SW.tolist()


def _starts(trees: list[Tree]) -> list[int]:
    starts = [0]
    for tree in trees:
        starts.append(starts[-1] + len(tree))
    return starts


@pytest.mark.parametrize("verify", [reference.verify, launch.verify], ids=["reference", "launch"])
def test_walks_by_hand(device: str, verify: Verify) -> None:
    chain = [(-1, -1, 7), (0, 7, 8), (1, 8, 9), (2, 5, 1)]  # the third draft is wrong
    none_drafted = [(-1, -1, 3)]
    tree = [(-1, -1, 4), (0, 6, 0), (0, 4, 2), (1, 4, 0), (2, 2, 5), (2, 2, 6), (4, -1, 0)]
    first_is_wrong = [(-1, -1, 4), (0, 5, 4), (1, 4, 4)]
    not_sampled = [(-1, -1, -1), (0, -1, 3)]
    counts, nodes = run(verify, device, [chain, none_drafted, tree, first_is_wrong, not_sampled], 4)
    assert counts == [3, 1, 3, 1, 1]
    assert nodes == [[0, 1, 2, -1], [4, -1, -1, -1], [5, 7, 9, -1], [12, -1, -1, -1], [15, -1, -1, -1]]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    size = draw(st.integers(1, 6))
    return [(draw(st.integers(0, node - 1)) if node else -1, draw(st.integers(-1, 2)), draw(st.integers(0, 2)))
            for node in range(size)]  # fmt: skip


@given(some=st.lists(trees(), min_size=1, max_size=3), longest=st.integers(1, 4))
@settings(max_examples=25)
def test_launch_equals_the_reference(device: str, some: list[Tree], longest: int) -> None:
    assert run(launch.verify, device, some, longest) == run(reference.verify, device, some, longest)
