"""Which level works on this machine: found by doing.

A canary runs in a sandbox, tries what must be denied and what must be allowed, and a layer is `enforced` only if all of
the first failed where the second worked. Settings are never read for that; they only explain a failure.
"""

import atexit
import os
import secrets
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from agentrt.core.errors import SandboxFailure
from agentrt.sandbox import channel
from agentrt.sandbox.inside import canary, landlock
from agentrt.sandbox.inside.job import Job
from agentrt.sandbox.launcher import Launcher, layers_of, make_place, sweep
from agentrt.sandbox.level import Isolation, Layers, Level
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.terms import Terms, ToolLimits
from agentrt.sandbox.zygote import Kind, Place, Zygote

CONTROLS = ("write_own", "read_own", "run_child", "socket_pair")
DENIED = {
    "files": ("read_secret", "write_outside"),
    "network": ("tcp", "udp", "unix"),
    "processes": ("signal_runtime", "read_environment", "fork_bomb"),
    "syscalls": ("unshare", "io_uring", "memfd"),
    "identity": ("be_root",),
}
"""Acts of the canary, by the layer that denies them."""
NEEDED = {
    Level.L3: ("files", "network", "processes", "syscalls", "identity"),
    Level.L2: ("files", "network", "processes", "syscalls", "identity"),
    Level.L1: ("identity",),
}
_LIMITS = ToolLimits(processes=8, address_space_mb=1024, cpu_seconds=10)
_TERMS = Terms(limits=_LIMITS)
_SECONDS = 20.0


@cache
def shared() -> Launcher:
    """The launcher of this process, at the strongest level that works. Made once, in about 0.2 s, blocking.

    Raises `SandboxFailure` if not even limits work.
    """
    sweep()
    place = make_place()
    launcher = strongest(place, tuple(Level)[::-1])
    atexit.register(launcher.close)
    return launcher


def strongest(place: Place, levels: tuple[Level, ...]) -> Launcher:
    """The first level that a canary finds in force; the report says why the ones before are not."""
    reasons: list[str] = []
    for level in levels:
        launcher, reason = _try(place, level, layers_of(level))
        if launcher is not None:
            fixes = tuple(fix for text, fix in _FIXES.items() if any(text in reason for reason in reasons))
            isolation = msgspec.structs.replace(launcher.isolation, reasons=tuple(reasons), fixes=fixes)
            return Launcher(place, launcher.layers, isolation)
        reasons.append(f"{level.name}: {reason}")
    raise SandboxFailure(f"no tool can run on this machine: {'; '.join(reasons)}")


def _try(place: Place, level: Level, layers: Layers) -> tuple[Launcher | None, str]:
    if level is Level.L2 and layers.landlock < landlock.SCOPES_ABI:
        return None, f"Landlock ABI {layers.landlock} is below {landlock.SCOPES_ABI}"
    if level > Level.L1 and not layers.seccomp:
        return None, f"no seccomp filter is known for {os.uname().machine}"
    with closing(Launcher(place, layers, Isolation(level=level, layers={}, limits=_limits(level)))) as launcher:
        result = run_canary(launcher)
    if result.outcome != "ok":
        return None, result.text
    done = msgspec.json.decode(result.text, type=dict[str, bool])
    failed = [act for act in CONTROLS if not done[act]]
    if failed:
        return None, f"a tool could not {', '.join(failed)}"
    states = {layer: _state(done, acts) for layer, acts in DENIED.items()}
    through = [f"{layer} {states[layer]}" for layer in NEEDED[level] if states[layer] != ENFORCED]
    if through:
        return None, "; ".join(through)
    return Launcher(place, layers, msgspec.structs.replace(launcher.isolation, layers=states)), ""


ENFORCED = "enforced"


def _state(done: dict[str, bool], acts: tuple[str, ...]) -> str:
    through = [act for act in acts if done[act]]
    return f"lets {', '.join(through)} through" if through else ENFORCED


def _limits(level: Level) -> dict[str, str]:
    is_alone = level is Level.L3
    return {
        "wall": "all processes",
        "cpu": "all processes (polled)",
        "memory": "all processes (polled), and each one's address space",
        "processes": "of the call" if is_alone else "of the user",
        "disk": "the folder (polled), each file" + (", /tmp by its size" if is_alone else ""),
    }


def run_canary(launcher: Launcher) -> ToolResult:
    """Run the canary, blocking."""
    return in_thread(partial(_canary, launcher))


def in_thread(call: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
    """Run `call` in a thread with an event loop of its own: this one may be inside another."""
    results: list[ToolResult] = []
    thread = threading.Thread(target=lambda: results.append(anyio.run(call)))
    thread.start()
    thread.join()
    return results[0] if results else ToolResult(outcome="infra", text="the call raised an error")


_PROGRAM = os.path.abspath(canary.__file__)
_ARGV = (os.path.realpath(sys.executable), "-I", "-S", _PROGRAM)


async def _canary(launcher: Launcher) -> ToolResult:
    kind = Kind(readable=(_PROGRAM,))
    with launcher.folder() as folder, bait(folder) as request:

        def start() -> tuple[Zygote, Job]:
            return launcher.zygote(kind), launcher.job(_ARGV, folder, _TERMS)

        return await channel.call(start, request, seconds=_SECONDS, limits=_LIMITS)


@contextmanager
def bait(folder: Path) -> Iterator[dict[str, Any]]:
    """What the canary of an episode in `folder` tries to get at: all of it within reach of an ordinary process."""
    secret, outside, address = (folder.with_suffix(suffix) for suffix in (".secret", ".outside", ".socket"))
    secret.write_text("canary")
    outside.touch()
    outside.chmod(0o666)
    cookie = secrets.token_hex(8)
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        unix.bind(os.fspath(address))
        address.chmod(0o666)
        for listener in (tcp, unix):
            listener.listen()
        yield {
            "secret": str(secret), "outside": str(outside), "tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1],
            "unix": str(address), "pid": os.getpid(), "processes": _LIMITS.processes, "cookie": cookie,
        }  # fmt: skip
    for path in (secret, outside, address):
        path.unlink()


_FIXES = {
    "unshare: Operation not permitted": "allow unprivileged user namespaces (in Docker: a seccomp profile that allows "
    "unshare and mount; on Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0)",
    "unshare: No space left": "raise sysctl user.max_user_namespaces",
    "uid_map": "on Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile",
    "Landlock ABI": "Linux 6.12 or newer, with landlock among the boot parameter lsm=",
    "Permission denied": "install Python where other users can execute it (not under a home that is closed to them)",
}
"""What a reason says, and what to do about it."""
