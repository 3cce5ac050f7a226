"""New weights: from where they come, and that they fit, before anything of the present ones is touched.

An update has two halves. *Staging* runs beside the steps, in a thread of its own: the tensors are read from their source,
each is checked by name and shape, and the runner makes of them all that it needs (packed, quantised, tied). *Installing*
is one assignment between two steps. So a failure at any point leaves the old weights as they were, there is no moment
at which half of the weights are new, and a request waits for that assignment only. It costs room for the weights twice
while an update runs.

Several engines that take one broadcast vote before they install: the version changes on all of them or on none.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from math import prod
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from agentrt.core.errors import UsageError, WeightsError
from agentrt.core.protocol import BroadcastWeights, DeviceWeights, SharedWeights, WeightSource
from agentrt.engine.device_weights import from_device
from agentrt.engine.model.folder import read_folder

BUCKET_ELEMENTS = 2**24
"""Tensors are broadcast together up to this many elements, 64 MiB."""

Shapes = Mapping[str, tuple[int, ...]]
Install = Callable[[], None]
"""Makes staged weights the ones that are used. Called between two steps; it does all or nothing."""
Stage = Callable[[Mapping[str, Tensor]], Install]


def staged(source: WeightSource, shapes: Shapes, stage: Stage) -> Install:
    """Read weights of these names and shapes and stage them. Raises `WeightsError`; nothing is used before `Install`."""
    if isinstance(source, BroadcastWeights):
        return _staged_together(source, shapes, stage)
    return _staged(source, shapes, stage)


def check_weights(weights: Mapping[str, Tensor], shapes: Shapes) -> None:
    """Raise `WeightsError` unless `weights` are float tensors of exactly these names and shapes.

    A tied output layer may be given too, if it is what the embedding is.
    """
    missing, unknown = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing:
        raise WeightsError(f"{missing[0]} is missing from the new weights, and {len(missing) - 1} more")
    if unknown == ["lm_head.weight"]:
        head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
        if head.shape != embedding.shape or not torch.equal(head, embedding):
            raise WeightsError("lm_head.weight differs from the embedding, and this model ties the two")
    elif unknown:
        raise WeightsError(f"the model has no {unknown[0]}; the new weights are of another one")
    for name, shape in shapes.items():
        tensor = weights[name]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise WeightsError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; the model needs floats of shape {shape}"
            )


@contextmanager
def shared_weights(weights: Mapping[str, Tensor]) -> Iterator[SharedWeights]:
    """For a trainer in another process: put weights into shared memory and yield what the engine is to be told.

    The memory is given back at the end of the scope; the engine has its copy when its `update_weights` returns.
    """
    arrays = {name: tensor.detach().float().cpu().contiguous().numpy() for name, tensor in weights.items()}
    memory = SharedMemory(create=True, size=max(1, sum(array.nbytes for array in arrays.values())))
    tensors, start = dict[str, tuple[str, tuple[int, ...], int]](), 0
    try:
        for name, array in arrays.items():
            np.ndarray(array.shape, array.dtype, memory.buf, start)[...] = array
            tensors[name] = (str(array.dtype), array.shape, start)
            start += array.nbytes
        yield SharedWeights(memory.name, tensors)
    finally:
        memory.close()
        memory.unlink()


def broadcast_weights(weights: Mapping[str, Tensor], *, timeout_seconds: float = 60.0) -> None:
    """For a trainer in the default torch.distributed group: send weights to the engines in it, and wait for their vote.

    Every other rank has `update_weights` called with `BroadcastWeights`, `source` being this rank. Raises `WeightsError`
    if one of them could not take the weights: then none did.
    """
    timeout = timedelta(seconds=timeout_seconds)
    for bucket in buckets({name: tuple(tensor.shape) for name, tensor in weights.items()}):
        flat = torch.cat([weights[name].detach().to(_device(), torch.float32).flatten() for name in bucket])
        _wait(dist.broadcast(flat, dist.get_rank(), async_op=True), timeout)
    if not _all_agree(True, timeout):
        raise WeightsError("an engine could not take the weights; all keep their version")


def buckets(shapes: Shapes) -> list[list[str]]:
    """Names in sorted order, those together whose tensors are sent together: the same on every rank."""
    place, ends = 0, dict[str, int]()
    for name in sorted(shapes):
        ends[name] = place // BUCKET_ELEMENTS
        place += prod(shapes[name])
    return [list(names) for _, names in groupby(ends, key=ends.__getitem__)]


def _staged(source: WeightSource, shapes: Shapes, stage: Stage) -> Install:
    match source:
        case Path():
            weights = _from_folder(source)
        case SharedWeights():
            weights = _from_memory(source)
        case DeviceWeights():
            weights = from_device(source)
        case Mapping():
            weights = {name: tensor.detach() for name, tensor in source.items()}
        case _:
            raise WeightsError(f"weights come as tensors by name, a folder, shared or broadcast, not as {source!r}")
    check_weights(weights, shapes)
    return stage({name: weights[name] for name in shapes})


def _from_folder(folder: Path) -> dict[str, Tensor]:
    try:
        return read_folder(folder)
    except UsageError as error:
        raise WeightsError(str(error)) from error


def _from_memory(source: SharedWeights) -> dict[str, Tensor]:
    try:
        memory = SharedMemory(source.name)
    except (OSError, ValueError) as error:
        raise WeightsError(f"shared memory {source.name} cannot be opened: {error}") from error
    if sys.version_info < (3, 13):  # its maker gives it back; Python would do it here too, at the end of this process
        resource_tracker.unregister(f"/{memory.name.lstrip('/')}", "shared_memory")
    try:
        return {
            name: torch.from_numpy(np.ndarray(shape, _float_type(dtype), memory.buf, start).copy())
            for name, (dtype, shape, start) in source.tensors.items()
        }
    except (TypeError, ValueError) as error:
        raise WeightsError(f"shared memory {source.name} is not as described: {error}") from error
    finally:
        memory.close()


def _float_type(name: str) -> np.dtype[np.floating[Any]]:
    """A dtype of floats by its name; `ValueError` for others. Of objects, a copy would follow pointers that are none."""
    dtype = np.dtype(name)
    if dtype.kind != "f":
        raise ValueError(f"weights are floats, not {name}")
    return dtype


def _staged_together(source: BroadcastWeights, shapes: Shapes, stage: Stage) -> Install:
    """Receive every bucket, stage, and vote. A rank that fails still receives, so that nobody waits for it."""
    timeout, install, failure = timedelta(seconds=source.timeout_seconds), None, None
    weights = dict[str, Tensor]()
    for bucket in buckets(shapes):
        flat = torch.empty(sum(prod(shapes[name]) for name in bucket), device=_device())
        _wait(dist.broadcast(flat, source.source, async_op=True), timeout)
        parts = torch.split(flat, [prod(shapes[name]) for name in bucket])
        weights |= {name: part.view(shapes[name]) for name, part in zip(bucket, parts, strict=True)}
    try:
        install = stage(weights)
    except Exception as error:  # whatever it is, the others must hear of it before it is raised
        failure = error
    agree = _all_agree(failure is None, timeout)
    if install is None:
        raise WeightsError(f"the weights cannot be used: {failure}") from failure
    if not agree:
        raise WeightsError("another engine could not take the weights; all keep their version")
    return install


def _all_agree(vote: bool, timeout: timedelta) -> bool:
    ballot = torch.tensor(float(vote), device=_device())
    _wait(dist.all_reduce(ballot, dist.ReduceOp.MIN, async_op=True), timeout)
    return bool(ballot.item())


def _device() -> torch.device:
    """Where the default group's backend has its tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _wait(work: dist.Work | None, timeout: timedelta) -> None:
    """`WeightsError` if a rank is gone or too slow, or sends something else."""
    try:
        if work is not None:
            work.wait(timeout)
    except (RuntimeError, dist.DistError) as error:
        raise WeightsError(f"the other ranks did not take part: {error}") from error
