"""Weights in another process's GPU memory: what is told of them and what is made of that; where there is a GPU, for real."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from agentrt.core.errors import WeightsError
from agentrt.core.protocol import DeviceTensor, DeviceWeights
from agentrt.engine.device_weights import device_weights, from_device

UUIDS = ["GPU-a", "GPU-b"]
TOLD = DeviceTensor(
    dtype="bfloat16", shape=(3, 4), stride=(4, 1), offset=2, device="GPU-b", handle=b"\x00handle", storage_bytes=64,
    storage_start=512, counter=b"counter", counter_start=3, event=b"event", waits_for_event=True,
)  # fmt: skip


class OnDevice(Tensor):
    """A tensor that says it is on GPU 1."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA says on a machine with two; `reduce_tensor` gives what it would."""
    properties = [SimpleNamespace(uuid=uuid) for uuid in UUIDS]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(UUIDS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)

    def reduced(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        assert not tensor.requires_grad
        return reductions.rebuild_cuda_tensor, (
            type(tensor), tensor.size(), tensor.stride(), 2, torch.storage.TypedStorage, tensor.dtype, 1, b"\x00handle", 64,
            512, False, b"counter", 3, b"event", True,
        )  # fmt: skip

    monkeypatch.setattr(reductions, "reduce_tensor", reduced)


@pytest.mark.usefixtures("two_gpus")
def test_what_is_told_goes_through_json_and_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU has another number in the process that reads it."""
    weight = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True).as_subclass(OnDevice)
    with device_weights({"a": weight}) as told:
        assert told == DeviceWeights({"a": TOLD})
    received = msgspec.convert(msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(told))), DeviceWeights)
    assert received == told
    rebuilt: list[Any] = []
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *parts: rebuilt.append(parts) or torch.ones(2))
    UUIDS.reverse()
    monkeypatch.setattr(torch.cuda, "get_device_properties", [SimpleNamespace(uuid=uuid) for uuid in UUIDS].__getitem__)
    UUIDS.reverse()
    assert from_device(received)["a"].tolist() == [1, 1]
    assert rebuilt == [
        (Tensor, (3, 4), (4, 1), 2, torch.storage.TypedStorage, torch.bfloat16, 0, b"\x00handle", 64, 512, False, b"counter",
         3, b"event", True)
    ]  # fmt: skip


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "load"}, "a is of a type 'load' that torch does not know"),
        ({"device": "GPU-c"}, "a is on GPU GPU-c, which this process does not see"),
        ({}, "a cannot be had from the GPU memory of another process: it is gone"),
    ],
    ids=["type", "device", "gone"],
)
def test_what_cannot_be_had(change: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rebuild(*parts: Any) -> Tensor:
        raise RuntimeError("it is gone")

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    with pytest.raises(WeightsError, match=message):
        from_device(DeviceWeights({"a": msgspec.structs.replace(TOLD, **change)}))


def test_memory_of_the_host_is_not_told() -> None:
    said = "a is on the cpu; memory of a GPU is told here: take shared_weights"
    with pytest.raises(WeightsError, match=said), device_weights({"a": torch.zeros(2)}):
        pass


READER = """
import sys, msgspec
from agentrt.core.protocol import DeviceWeights
from agentrt.engine.device_weights import from_device
weights = from_device(msgspec.json.decode(sys.stdin.buffer.readline(), type=DeviceWeights))
print({name: (str(one.dtype), one.tolist()) for name, one in weights.items()})
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_process_reads_them() -> None:
    """Also a view of a larger storage, and of a type that numpy does not have."""
    whole = torch.arange(24, dtype=torch.bfloat16, device="cuda").view(4, 6)
    weights = {"part": whole[1:3, 2:4], "scalar": torch.tensor(0.5, device="cuda")}
    with device_weights(weights) as told:
        found = subprocess.run(
            [sys.executable, "-c", READER], input=msgspec.json.encode(told) + b"\n", stdout=subprocess.PIPE, check=True
        ).stdout.decode()
    assert found.strip() == str(
        {"part": ("torch.bfloat16", [[8.0, 9.0], [14.0, 15.0]]), "scalar": ("torch.float32", 0.5)}
    )
