"""The level is found by doing, on machines where layers are missing: fakes of them, as outer shells."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agentrt
from agentrt.core.errors import SandboxFailure, UsageError
from agentrt.sandbox.inside import landlock, seccomp
from agentrt.sandbox.launcher import Launcher
from agentrt.sandbox.level import Isolation, Layers, Level
from agentrt.sandbox.probe import CONTROLS, DENIED, run_canary, strongest
from agentrt.sandbox.sandbox import require
from agentrt.sandbox.terms import Terms
from agentrt.sandbox.zygote import Place

REPORT = """
from agentrt.sandbox.probe import shared
found = shared().isolation
print(found.level.name)
print(*found.reasons, *found.fixes, sep="\\n")
"""
OVER_LIMITS = """
import sys
import anyio
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.sandbox import Sandbox
from agentrt.sandbox.terms import Terms, ToolLimits

async def main():
    terms = Terms(limits=ToolLimits(memory_mb=100, cpu_seconds=2, disk_mb=10))
    with Sandbox(Permits(1), shared()) as sandbox:
        results = [
            await sandbox.call([sys.executable, "-I", "-S", "-c", code], {}, seconds=20, terms=terms)
            for code in (
                "import os; print(os.listdir('/proc'))",
                "import time; x = b'x' * (200 << 20); time.sleep(15)",
                "import os\\nfor _ in range(3): os.fork()\\nwhile True: pass",
                "import os, time\\nos.mkdir('in')\\nopen('in/a', 'wb').write(b'x' * (20 << 20))\\n"
                "os.chmod('in', 0)\\ntime.sleep(15)",
            )
        ]
    assert results[2].cpu_seconds < 6, "each of eight may use as much as all"
    print(results[0].text.strip(), *(result.outcome for result in results[1:]))

anyio.run(main)
"""
"""Where no call has a /proc of its own, its processes are looked at nevertheless."""
LIKE_DOCKER = """
from agentrt.sandbox.inside import linux, seccomp
machine = seccomp.MACHINES[__import__("platform").machine()]
denied = tuple(number for number in machine.denied if number in (272, 165, 308, 155, 97, 40, 268, 41))
linux.no_new_privileges()
like = machine._replace(denied=denied, socket=1000, socketpair=1001)
program = seccomp.program(like)
linux.prctl_pointer(22, 2, seccomp._Program(len(program) // 8, program))
"""


def reported(*argv: str) -> list[str]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(landlock.abi() < landlock.SCOPES_ABI, reason="no Landlock to fall back on")
def test_like_docker_there_is_landlock_and_the_report_says_why() -> None:
    level, *why = reported(sys.executable, "-c", LIKE_DOCKER + REPORT)
    assert level == "L2"
    assert why[0] == "L3: unshare: Operation not permitted"
    assert "allow unprivileged user namespaces" in why[1]


def as_a_user() -> list[str]:
    """Before a command, for root: run it as a user with no rights, from whom no folder on the way to Python is closed.

    Bubblewrap fakes a lack for users; root's limits and mounts are others.
    """
    if os.getuid():
        return []
    drop = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]  # not nobody: all others look like that
    needed = [Path(path).resolve() for path in (sys.base_prefix, sys.prefix, agentrt.__path__[0])]
    closed = {folder for path in needed for folder in path.parents if not folder.stat().st_mode & 0o001}
    tops = [folder for folder in sorted(closed) if not closed & set(folder.parents)]
    if not tops:
        return drop
    outer = ["bwrap", "--bind", "/", "/", "--dev-bind", "/dev", "/dev"]
    for top in tops:
        kept = [path for path in needed if top in path.parents]
        between = sorted({folder for path in kept for folder in path.parents if top in folder.parents})
        outer += ["--perms", "0755", "--tmpfs", str(top)]
        outer += [arg for folder in between for arg in ("--perms", "0755", "--dir", str(folder))]
        outer += [arg for path in kept for arg in ("--ro-bind", str(path), str(path))]
    return [*outer, *drop]


fakes = pytest.mark.skipif(
    shutil.which("bwrap") is None or (os.getuid() == 0 and shutil.which("setpriv") is None),
    reason="bubblewrap fakes a lack, for users: root becomes one by setpriv",
)


@fakes
@pytest.mark.skipif(landlock.abi() < landlock.SCOPES_ABI, reason="no Landlock to fall back on")
def test_without_user_namespaces_there_is_landlock() -> None:
    outer = [*as_a_user(), "bwrap", "--unshare-user", "--disable-userns", "--bind", "/", "/", "--dev", "/dev"]
    level, *why = reported(*outer, sys.executable, "-c", REPORT)
    assert level == "L2"
    assert why[0].startswith("L3: unshare: ")


@fakes
def test_with_a_masked_proc_there_are_namespaces_still(launcher: Launcher) -> None:
    if launcher.isolation.level is not Level.L3:
        pytest.skip("about namespaces")
    mask = ["--ro-bind", "/dev/null", "/proc/version"]
    outer = [*as_a_user(), "bwrap", "--unshare-user", "--bind", "/", "/", "--dev", "/dev", *mask]
    level, *_, found = reported(*outer, sys.executable, "-c", REPORT + OVER_LIMITS)
    assert (level, found) == ("L3", "[] memory cpu disk")


def test_the_canary_would_see_a_hole(place: Place) -> None:
    launcher = Launcher(place, Layers(namespaces=False, landlock=0, seccomp=False), _isolation(Level.L1))
    try:
        text = run_canary(launcher).text
    finally:
        launcher.close()
    through = {act for acts in DENIED.values() for act in acts if f'"{act}":true' in text}
    assert {"read_secret", "write_outside", "tcp", "udp", "unix", "memfd"} <= through
    assert all(f'"{act}":true' in text for act in CONTROLS)


def test_a_level_that_does_not_work_is_not_passed_off(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 3)
    with pytest.raises(SandboxFailure, match="L2: Landlock ABI 3 is below 6"):
        strongest(place, (Level.L2,))


def test_weak_isolation_needs_a_word() -> None:
    terms, weak = Terms(min_isolation=Level.L2), _isolation(Level.L1)
    require(terms, _isolation(Level.L2), allow_weak=False)
    require(terms, weak, allow_weak=True)
    require(Terms(min_isolation=Level.L1), weak, allow_weak=False)
    with pytest.raises(UsageError, match="a tool needs isolation L2, and this machine gives L1"):
        require(terms, weak, allow_weak=False)
    with pytest.raises(UsageError, match="a tool needs isolation L3"):
        require(Terms(min_isolation=Level.L3), _isolation(Level.L2), allow_weak=True)


def _isolation(level: Level) -> Isolation:
    return Isolation(level=level, layers={}, limits={"memory": "polled"})


@pytest.mark.parametrize("name", seccomp.MACHINES)
def test_a_filter_is_well_formed(name: str) -> None:
    machine = seccomp.MACHINES[name]
    assert len(seccomp.program(machine)) // 8 < 256
    assert len(set(machine.denied)) == len(machine.denied)
    looked_into = {machine.clone, machine.socket, machine.socketpair, machine.ioctl, machine.setpriority}
    assert not (looked_into | {machine.ioprio_set, *machine.of_itself}) & set(machine.denied)
