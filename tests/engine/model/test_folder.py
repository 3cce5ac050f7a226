"""A folder's tensors are those of all its files, and what cannot be read is named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrt.core.errors import UsageError
from agentrt.engine.model.folder import read_folder


def test_the_tensors_of_all_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"c": torch.tensor([3.0])}, tmp_path / "two.safetensors")
    (tmp_path / "notes.txt").write_text("not of the weights")
    found = read_folder(tmp_path)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [1.0, 1.0], "b": [0.0], "c": [3.0]}
    assert read_folder(tmp_path, {"c", "d"}).keys() == {"c"}


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no safetensors; give the folder that the weights are in"):
        read_folder(tmp_path)
    (tmp_path / "torn.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UsageError, match=r"torn\.safetensors: cannot be read: .*; fetch or save it again"):
        read_folder(tmp_path)
