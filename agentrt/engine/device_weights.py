"""Weights in the GPU memory of another process on this machine (CUDA IPC): how they are told, and how they are had.

What `torch.multiprocessing` would send through a queue, as plain numbers and bytes: it goes through HTTP too, and nothing that
comes in is unpickled. A GPU is named by its UUID, for processes number theirs differently. Here are views; who stages them
copies them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from agentrt.core.errors import WeightsError
from agentrt.core.protocol import DeviceTensor, DeviceWeights


@contextmanager
def device_weights(weights: Mapping[str, Tensor]) -> Iterator[DeviceWeights]:
    """For a trainer in another process: what the engine is to be told of tensors on a GPU that it shares with this process.

    Nothing is copied here, and the tensors must stay as they are until the engine's `update_weights` returns. Raises
    `WeightsError` if one is not on a GPU.
    """
    told = DeviceWeights({name: _told(name, tensor.detach()) for name, tensor in weights.items()})
    try:
        yield told
    finally:
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def from_device(source: DeviceWeights) -> dict[str, Tensor]:
    """Views of the other process's memory, which it may free once they are gone; `WeightsError` if they cannot be had."""
    numbers = {_uuid(number): number for number in range(torch.cuda.device_count())}
    return {name: _had(name, tensor, numbers) for name, tensor in source.tensors.items()}


def _told(name: str, tensor: Tensor) -> DeviceTensor:
    if tensor.device.type != "cuda":
        raise WeightsError(f"{name} is on the {tensor.device.type}; memory of a GPU is told here: take shared_weights")
    _, parts = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    _, shape, stride, offset, _, dtype, number, handle, size, start, _, counter, counter_at, event, waits = parts
    return DeviceTensor(
        dtype=str(dtype).removeprefix("torch."), shape=tuple(shape), stride=tuple(stride), offset=offset, device=_uuid(number),
        handle=handle, storage_bytes=size, storage_start=start, counter=counter, counter_start=counter_at, event=event,
        waits_for_event=waits,
    )  # fmt: skip


def _had(name: str, told: DeviceTensor, numbers: Mapping[str, int]) -> Tensor:
    dtype = getattr(torch, told.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"{name} is of a type {told.dtype!r} that torch does not know")
    if told.device not in numbers:
        raise WeightsError(f"{name} is on GPU {told.device}, which this process does not see (CUDA_VISIBLE_DEVICES)")
    try:
        tensor: Tensor = reductions.rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            Tensor, torch.Size(told.shape), told.stride, told.offset, torch.storage.TypedStorage, dtype,
            numbers[told.device], told.handle, told.storage_bytes, told.storage_start, False, told.counter,
            told.counter_start, told.event, told.waits_for_event,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise WeightsError(f"{name} cannot be had from the GPU memory of another process: {error}") from error
    return tensor


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
