"""Every Triton kernel compiled for four GPUs, on a machine without one: what it takes is what docs/kernels.md says.

Triton keeps what it compiled by the hash of the source, so this is slow only after a kernel has changed.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent.parent
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
GROWTH = 1.1
"""What a number may grow before the table must be made anew: another patch of Triton shifts a register or two."""


Taken = dict[str, tuple[int, int, int]]
"""Registers, shared memory and spilled bytes, by kernel."""


@pytest.fixture(scope="module")
def compiled() -> dict[str, Taken]:
    """By target; shared memory in bytes."""
    path = os.pathsep.join([str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, ROOT / "bench" / "kernel_table.py", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {
        target: {name: tuple(taken[target]) for name, taken in found.items() if target in taken} for target in TARGETS
    }


def documented() -> dict[str, Taken]:
    """The table of docs/kernels.md by target; shared memory in KiB."""
    rows = re.findall(r"^\| (.+?) \|(.+)\|$", (ROOT / "docs" / "kernels.md").read_text(), re.MULTILINE)
    head = next(index for index, (name, _) in enumerate(rows) if name == "kernel")
    targets = [cell.strip() for cell in rows[head][1].split("|")]
    table: dict[str, Taken] = {target: {} for target in targets}
    for name, cells in rows[head + 1 :]:
        for target, cell in zip(targets, cells.split("|"), strict=True):
            if "/" in cell:
                registers, shared, spilled = (int(number) for number in cell.split("/"))
                table[target][name] = (registers, shared, spilled)
    return table


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_spills_and_none_has_grown(compiled: dict[str, Taken], target: str) -> None:
    found, table = compiled[target], documented()[target]
    assert found.keys() == table.keys(), "make the table anew: python bench/kernel_table.py"
    controls = [name for name in found if name.startswith("control")]
    assert [found[name][2] > 0 for name in controls] == [True], "the control kernel must spill, or spills are not seen"
    for name, (registers, shared, spilled) in found.items():
        if name not in controls:
            assert registers <= table[name][0] * GROWTH + 2, name
            assert shared <= table[name][1] * 1024 * GROWTH, name
            assert spilled == 0, name
