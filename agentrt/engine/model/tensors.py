"""The tensors of a model, wherever its parts keep them: what a CUDA graph has the addresses of."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn


def tensors_of(part: object) -> Iterator[Tensor]:
    """Every tensor that a model or a part of one holds, each once, in an order that follows from how it was made."""
    yield from {id(tensor): tensor for tensor in _walk(part)}.values()


@torch.no_grad()
def overwrite(held: object, new: object) -> None:
    """Give a model, or a part, the numbers of another of the same config, in the memory that it has."""
    for there, tensor in zip(tensors_of(held), tensors_of(new), strict=True):
        there.copy_(tensor, non_blocking=True)


def _walk(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, nn.Module):
        yield from (*part.parameters(), *part.buffers())
    elif isinstance(part, list | tuple):
        for inner in part:
            yield from _walk(inner)
    elif isinstance(part, dict):
        yield from _walk(list(part.values()))
    elif isinstance(part, partial):
        yield from _walk([*part.args, *part.keywords.values()])
    elif hasattr(part, "__dict__") and not isinstance(part, type):
        yield from _walk(list(vars(part).values()))
