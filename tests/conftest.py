"""Fixtures for all tests: the event loops, virtual time, the device of kernels, and how hypothesis runs."""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

if not any(os.path.exists(path) for path in ("/dev/nvidia0", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports a kernel

settings.register_profile("agentrt", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("agentrt")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both event loops, in real time."""
    backend: str = request.param
    return backend


@pytest.fixture
def virtual_time() -> tuple[str, dict[str, Any]]:
    """An event loop whose clock jumps when all tasks wait: override `anyio_backend` with it."""
    from trio.testing import MockClock

    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture(scope="session")
def device() -> str:
    """Where the Triton kernels run: on the GPU, or, in Triton's interpreter, on the CPU."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    pytest.importorskip("triton")
    from agentrt_kernels.interpreted import repair

    repair()
    return "cpu"
