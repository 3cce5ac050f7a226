"""The source roots are no packages, and `import agentrt` is light."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "numba", "transformers", "tokenizers", "jsonschema", "triton")


@pytest.mark.parametrize("root", ["kernels", "tools", "envs", "tests"])
def test_a_source_root_has_no_init(root: str) -> None:
    assert (ROOT / root).is_dir()
    assert not (ROOT / root / "__init__.py").exists()


def test_import_agentrt_is_light() -> None:
    code = f"import sys, agentrt; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_testing_imports_no_torch() -> None:
    code = "import sys, agentrt.testing; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
