"""Copies of pages from one pool to another: the definition."""

from collections.abc import Sequence

from torch import Tensor


def copy_pages(source_PB: Tensor, target_PB: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Page `sources[i]` of one pool becomes page `targets[i]` of the other; pages are rows of bytes.

    No page is named twice among the targets. Either pool may be pinned memory of the host.
    """
    target_PB[list(targets)] = source_PB[list(sources)].to(target_PB.device)
