"""Pages from one pool to another: exact, whatever the pages hold."""

import pytest
import torch

from agentrt_kernels.swap import launch, reference


@pytest.mark.parametrize("page_bytes", [16 * 3 * 2 * 80 * 4, 4, 3 * 5, 20_000])
def test_copies_are_exact(device: str, page_bytes: int) -> None:
    """Random bits, so NaN of every kind too. On a GPU also to and from pinned memory."""
    pool = torch.randint(0, 256, (8, page_bytes), dtype=torch.uint8)
    other = torch.randint(0, 256, (5, page_bytes), dtype=torch.uint8)
    sources, targets = [5, 0, 3, 5], [1, 4, 2, 0]
    expected = other.clone()
    reference.copy_pages(pool, expected, sources, targets)
    assert expected[4].tolist() == pool[0].tolist()
    pinned = [tensor.pin_memory() if device == "cuda" else tensor.clone() for tensor in (pool, other)]
    for source, target in (
        (pool.to(device), other.to(device)), (pool.to(device), pinned[1]), (pinned[0], other.to(device)),
    ):  # fmt: skip
        launch.copy_pages(source, target, sources, targets)
        if device == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(target.cpu(), expected)


def test_no_pages(device: str) -> None:
    pool = torch.arange(12, dtype=torch.uint8, device=device).view(3, 4)
    launch.copy_pages(pool, pool, [], [])
    assert pool.flatten().tolist() == list(range(12))
