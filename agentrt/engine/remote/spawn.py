"""`spawned`: several engines on this machine, each a process that serves one model to the process that started it.

    here: listen ──► start, hand over the socket ──► forget the socket ──► ask at its address as of any server

A server's socket listens before the server is there, so nobody has to find out its address or when it is ready: who asks
early waits. It holds the only copy then, so that one that ends is noticed at once. Its standard input is a pipe from here:
the key comes by it, and it ends with it. When this process ends, however it does, so do its engines.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec

from agentrt.core.spec import EngineSpec

END_SECONDS = 10.0
"""How long a server may take to end before it is killed."""
HERE = "127.0.0.1"


@contextmanager
def spawned(model: str, spec: EngineSpec, key: str, *, host: str = HERE) -> Iterator[list[str]]:
    """Start the `spec.engines` servers of a model; the URLs at which they answer to `key`. They end with the block.

    On `cuda` each has a GPU of its own.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(_server(model, _own(spec, index), key, host)) for index in range(spec.engines)]


@contextmanager
def _server(model: str, spec: EngineSpec, key: str, host: str) -> Iterator[str]:
    with socket.create_server((host, 0), backlog=2048) as listening:
        port, number = listening.getsockname()[1], listening.fileno()
        options = [
            "--socket",
            str(number),
            "--weights",
            "/",
            *_assignments(spec),
        ]  # who has the key may read what we may
        process = subprocess.Popen(
            [sys.executable, "-m", "agentrt", "serve", model, *options],
            stdin=subprocess.PIPE, pass_fds=[number], env=_variables(spec),
            start_new_session=True,  # the terminal's Ctrl-C is for the run, which aborts what is in flight first
        )  # fmt: skip
    assert process.stdin is not None
    try:
        with suppress(BrokenPipeError):  # it has ended: who asks at its address is told
            process.stdin.write(f"{key}\n".encode())
            process.stdin.flush()
        yield f"http://{host}:{port}"
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _own(spec: EngineSpec, index: int) -> EngineSpec:
    """What the server of that number runs with."""
    return msgspec.structs.replace(spec, device=f"cuda:{index}" if spec.device == "cuda" else spec.device)


def _assignments(spec: EngineSpec) -> list[str]:
    """The `--set` options for what differs from the defaults; JSON's numbers, bools and strings are TOML's."""
    own: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(spec, engines=1))
    usual = msgspec.to_builtins(EngineSpec())
    changed = {name: value for name, value in own.items() if value != usual[name]}
    return [part for name, value in changed.items() for part in ("--set", f"{name}={json.dumps(value)}")]


def _variables(spec: EngineSpec) -> Mapping[str, str]:
    """Its environment: unless it says otherwise, the engines share the cores."""
    share = max(1, (os.cpu_count() or 1) // spec.engines)
    return {"OMP_NUM_THREADS": str(share), "NUMBA_NUM_THREADS": str(share)} | os.environ
