"""What hostile code tries, at each level, and that the same code gets through where nothing is in the way."""

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from attacks import CONTROL, CONTROL_AS_ROOT, OTHERS, program
from supported import is_supported

from agentrt.sandbox.launcher import Launcher
from agentrt.sandbox.level import Level
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.probe import bait
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox
from agentrt.sandbox.terms import Terms, ToolLimits

TERMS = Terms(limits=ToolLimits(file_mb=32, processes=32, address_space_mb=1024))


@contextmanager
def targets(launcher: Launcher) -> Iterator[dict[str, Any]]:
    """What there is to attack: all of it within reach of an ordinary process of this user."""
    cookie = "s3cr3t-of-the-runtime"
    with launcher.folder() as other, bait(other) as request, socket.socket(socket.AF_UNIX) as abstract:
        (other / "private").write_text("of another episode")
        name = f"agentrt-test-{os.getpid()}"
        abstract.bind("\0" + name)
        abstract.listen()
        with subprocess.Popen(["/bin/sleep", "60"], env={"COOKIE": cookie}) as sleeper:
            passwords = "/etc/shadow" if os.getuid() == 0 else "/etc/passwd"
            yield request | {
                "passwords": passwords,
                "other": str(other),
                "abstract": name,
                "pid": sleeper.pid,
                "cookie": cookie,
            }
            sleeper.kill()


def run(launcher: Launcher, code: str, request: object = None, terms: Terms = TERMS, seconds: float = 20) -> ToolResult:
    """One call in a sandbox of its own."""

    async def call() -> ToolResult:
        with Sandbox(Permits(1), launcher) as sandbox:
            argv = [sys.executable, "-I", "-S", "-c", code]
            return await sandbox.call(argv, request, seconds=seconds, terms=terms)

    return anyio.run(call)


@pytest.fixture(scope="module")
def within_reach(launcher: Launcher) -> Iterator[dict[str, Any]]:
    with targets(launcher) as request:
        yield request


@pytest.mark.parametrize("name", [*CONTROL, *CONTROL_AS_ROOT, *OTHERS])
def test_an_attack_is_stopped(launcher: Launcher, within_reach: dict[str, Any], name: str) -> None:
    result = run(launcher, program((CONTROL | CONTROL_AS_ROOT | OTHERS)[name]), within_reach)
    assert (result.outcome, result.text) == ("ok", "stopped\n")


@pytest.mark.parametrize("name", CONTROL)
def test_an_attack_gets_through_where_nothing_is_in_the_way(
    within_reach: dict[str, Any], tmp_path: Path, name: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program(CONTROL[name])],
        input=json.dumps(within_reach), cwd=tmp_path, text=True, capture_output=True, timeout=20, check=True,
    )  # fmt: skip
    assert done.stdout == "through\n"


@pytest.mark.parametrize("name", CONTROL_AS_ROOT)
def test_an_attack_gets_through_for_the_root_of_a_namespace(tmp_path: Path, name: str) -> None:
    if not is_supported(Level.L3):
        pytest.skip("there are no namespaces to be root of")
    outer = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc"]
    with open("/dev/null") as left_open:
        done = subprocess.run(
            [*outer, sys.executable, "-I", "-S", "-c", program(CONTROL_AS_ROOT[name])], pass_fds=(left_open.fileno(),),
            input="{}", cwd=tmp_path, text=True, capture_output=True, timeout=20,
        )  # fmt: skip
    assert "through" in done.stdout, done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a way in of x86-64")
def test_the_32_bit_door_is_shut(launcher: Launcher) -> None:
    code = """
import ctypes, mmap
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
print("ready", flush=True)
print(call())
"""
    result = run(launcher, code)
    assert (result.outcome, result.exit_code, result.text) == ("signal", -31, "ready\n")


def test_memory_of_all_processes_together(launcher: Launcher) -> None:
    code = "import os, time\nfor _ in range(7):\n if os.fork() == 0: break\nx = b'x' * (40 << 20)\ntime.sleep(15)"
    terms = Terms(limits=ToolLimits(memory_mb=200))
    result = run(launcher, code, terms=terms)
    assert (result.outcome, result.seconds < 10) == ("memory", True)
    few = code.replace("range(7)", "range(2)").replace("sleep(15)", "sleep(0.3)")
    assert run(launcher, few, terms=terms).outcome == "ok"


def test_processor_time_of_all_processes_together(launcher: Launcher) -> None:
    code = "import os\nos.fork()\nwhile True: pass"
    result = run(launcher, code, terms=Terms(limits=ToolLimits(cpu_seconds=0.4)))
    assert (result.outcome, 0.4 <= result.cpu_seconds < 3) == ("cpu", True)


@pytest.mark.parametrize(
    "code",
    [
        "import time\nfor i in range(40): open(f'{i}', 'wb').write(b'x' * (1 << 20))\ntime.sleep(10)",
        "import os, time\nos.mkdir('in')\nfor i in range(40): open(f'in/{i}', 'wb').write(b'x' * (1 << 20))\n"
        "os.chmod('in', 0)\ntime.sleep(10)",
        "import time\nfor i in range(400): open(f'{i}', 'wb')\ntime.sleep(10)",
        "import os, time\nfor i in range(20): os.mkdir('d' * 250); os.chdir('d' * 250)\n"
        "for i in range(40): open(f'{i}', 'wb').write(b'x' * (1 << 20))\ntime.sleep(10)",
        "for i in range(400): open(f'{i}', 'wb')",
    ],
    ids=["bytes", "hidden", "inodes", "deep", "at the end"],
)
def test_disk(launcher: Launcher, code: str) -> None:
    result = run(launcher, code, terms=Terms(limits=ToolLimits(disk_mb=20, inodes=200)))
    assert (result.outcome, result.seconds < 8) == ("disk", True)


def test_temporary_files_are_bounded(launcher: Launcher) -> None:
    if launcher.isolation.level is not Level.L3:
        pytest.skip("without namespaces TMPDIR is in the folder, whose size is looked at")
    code = "import os\nopen(os.environ['TMPDIR'] + '/x', 'wb').write(b'x' * (9 << 20))"
    result = run(launcher, code, terms=Terms(limits=ToolLimits(tmp_mb=8)))
    assert (result.outcome, "No space left" in result.stderr) == ("exit_nonzero", True)


def test_a_hang_that_ignores_signals(launcher: Launcher) -> None:
    code = "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nos.close(1); os.close(2)\ntime.sleep(60)"
    result = run(launcher, code, seconds=0.5)
    assert (result.outcome, result.exit_code) == ("timeout", 124)


def test_endless_output_ends_with_the_limit_of_time(launcher: Launcher) -> None:
    result = run(launcher, "while True: print('x' * 60000)", seconds=0.5)
    assert (result.outcome, result.truncated, len(result.text) <= 65_536) == ("timeout", True, True)


def test_the_supervisor_cannot_be_ended(launcher: Launcher) -> None:
    code = """
import ctypes, os, resource, signal
for pid in {1, os.getppid()}:
    for number in range(1, 65):
        try: os.kill(pid, number)
        except OSError: pass
    assert ctypes.CDLL(None).ptrace(0x4206, pid, 0, 0) == -1  # PTRACE_SEIZE
    for reach in (
        lambda: open(f"/proc/{pid}/mem", "rb"), lambda: os.listdir(f"/proc/{pid}/fd"),
        *(lambda limit=limit: resource.prlimit(pid, limit, (0, 0)) for limit in range(16)),
        lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE),
        lambda: os.setpriority(os.PRIO_PROCESS, pid, 19), lambda: os.setpriority(os.PRIO_USER, 0, 19),
        lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
        lambda: os.sched_setaffinity(pid, {0}),
    ):
        try: reach()
        except OSError: continue
        raise AssertionError("it can be reached")
print("alive")
"""
    result = run(launcher, code)
    assert (result.outcome, result.text) == ("ok", "alive\n"), result.stderr


def test_what_must_work_works(launcher: Launcher) -> None:
    code = """
import asyncio, os, resource, sqlite3, ssl, subprocess, tempfile, threading
thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
sqlite3.connect("a.db").execute("create table t (x)")
with tempfile.TemporaryFile() as file: file.write(b"x")
ssl.create_default_context()
async def main():
    child = await asyncio.create_subprocess_exec("/bin/echo", "hi", stdout=subprocess.PIPE)
    return await child.communicate()
assert asyncio.run(main())[0] == b"hi\\n"
assert subprocess.run("echo $((1 + 1)) > two; nice cat two", shell=True, capture_output=True).stdout == b"2\\n"
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)); assert os.nice(1) == os.nice(0)
os.sched_setaffinity(0, os.sched_getaffinity(0))
open("/dev/null", "w").write("x"); open("/dev/urandom", "rb").read(1)
print("all")
"""
    result = run(launcher, code)
    assert (result.outcome, result.text) == ("ok", "all\n"), result.stderr


def test_no_setting_of_the_zygote_is_left_over(launcher: Launcher) -> None:
    result = run(launcher, "import os; print(sorted(os.environ)); print(os.getcwd() == os.environ['HOME'])")
    assert result.text == "['AGENTRT_REPLY_FD', 'HOME', 'LANG', 'PATH', 'TERM', 'TMPDIR']\nTrue\n"
