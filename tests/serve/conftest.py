"""Lets the tests of this folder import their helper `standing`; their loop is asyncio, the only one of uvicorn."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def anyio_backend() -> str:
    """See above."""
    return "asyncio"
