"""A folder of safetensors, read; what cannot be is said in one sentence."""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentrt.core.errors import UsageError


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file of safetensors, as `safe_open` gives it. `UsageError` if it, or a tensor in it, cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: cannot be read: {error}; fetch or save it again") from error


def read_folder(folder: Path, wanted: Container[str] | None = None) -> dict[str, Tensor]:
    """The tensors of all files in a folder, or those `wanted` of them. `UsageError` if there is no such file."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} has no safetensors; give the folder that the weights are in")
    found: dict[str, Tensor] = {}
    for path in files:
        with opened(path) as file:
            names = file.keys()
            found |= {name: file.get_tensor(name) for name in names if wanted is None or name in wanted}
    return found
