"""A model folder (config.json and safetensors) becomes a decoder.

Every tensor is checked by name and shape before any is used. Weights get the type of the device's operations,
whatever they were.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from agentrt.core.errors import UsageError
from agentrt.engine.model.config import ModelConfig, load_config
from agentrt.engine.model.decoder import Decoder, OpsName, expected_shapes, ops_for
from agentrt.engine.model.experts import held_type
from agentrt.engine.model.folder import opened
from agentrt.engine.model.quantized import FULL, Precision

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class LoadedModel(NamedTuple):
    """A decoder and the hash of the weights it was made of."""

    decoder: Decoder
    model_hash: str


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def load_model(
    folder: Path, device: str = "cpu", ops: OpsName | None = None, precision: Precision = FULL
) -> LoadedModel:
    """Read the model in `folder` to `device`; a `UsageError` of one sentence if it cannot be.

    Without `ops`, the operations are those of the device.
    """
    config = load_config(folder)
    weights = read_weights(folder, config)
    model_hash = hash_weights(weights)
    # A copy even where nothing changes: memory mapped from a file need not be aligned as torch's own is.
    own_ops, dtype = ops_for(torch.device(device))
    on_device = {name: tensor.to(device, held_type(name, dtype), copy=True) for name, tensor in weights.items()}
    return LoadedModel(Decoder(config, on_device, ops or own_ops, precision=precision), model_hash)


def read_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The tensors that the decoder needs, as the files hold them. Others in the files are left alone."""
    shapes = expected_shapes(config)
    file_of = _file_of(folder, shapes)
    weights: dict[str, Tensor] = {}
    for file in sorted(set(file_of.values())):
        wanted = [name for name in shapes if file_of[name] == file]
        weights |= _read_file(file, {name: shapes[name] for name in wanted})
    return weights


def hash_weights(weights: Mapping[str, Tensor]) -> str:
    """blake2b over names, dtypes, shapes and bytes, by name: the same however the model is cut into files."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _file_of(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Path]:
    """Which file holds each tensor."""
    if (folder / SINGLE).is_file():
        return dict.fromkeys(shapes, folder / SINGLE)
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index)
    except FileNotFoundError:
        raise UsageError(f"{folder}: no weights; a model folder needs {SINGLE}, or {INDEX} and its files") from None
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{folder / INDEX}: cannot be read: {error}; fetch the model again") from error
    missing = sorted(shapes.keys() - index.weight_map.keys())
    if missing:
        raise UsageError(f"{folder / INDEX}: {_named(missing)} missing; config.json is of another model")
    return {name: folder / index.weight_map[name] for name in shapes}


def _read_file(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    with opened(path) as file:
        missing = sorted(shapes.keys() - set(file.keys()))
        if missing:
            raise UsageError(f"{path}: {_named(missing)} missing; config.json is of another model")
        for name, shape in shapes.items():
            there = file.get_slice(name)
            if not there.get_dtype().startswith(("F", "BF")):
                raise UsageError(
                    f"{path}: {name} is {there.get_dtype()} and must be floats; fetch a model not quantised"
                )
            found = tuple(there.get_shape())
            if found != shape:
                raise UsageError(f"{path}: {name} is {found} and by config.json {shape}; they are of two models")
        return {name: file.get_tensor(name) for name in shapes}


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"{names[0]}{more}"
