"""One-shot calls: the contract, and that nothing outlives a call."""

import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from agentrt.sandbox.launcher import Launcher
from agentrt.sandbox.level import Level
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.reply import Progress
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox
from agentrt.sandbox.terms import Terms, ToolLimits
from agentrt.sandbox.zygote import Place

pytestmark = pytest.mark.anyio
SECRETS = (
    "OPENAI_API_KEY", "DATABASE_URL", "HF_TOKEN", "SLACK_WEBHOOK", "AWS_ACCESS_ID", "SSH_AUTH_SOCK", "MY_VENDOR_THING",
)  # fmt: skip


@pytest.fixture
def sandbox(launcher: Launcher) -> Iterator[Sandbox]:
    with Sandbox(Permits(4), launcher) as opened:
        yield opened


async def shell(sandbox: Sandbox, script: str, seconds: float = 20.0) -> ToolResult:
    return await sandbox.call(["/bin/sh", "-c", script], {}, seconds=seconds)


async def python(sandbox: Sandbox, code: str, request: object = None, seconds: float = 20.0) -> ToolResult:
    return await sandbox.call([sys.executable, "-I", "-S", "-c", code], request, seconds=seconds)


def processes_of(sandbox: Sandbox) -> list[str]:
    """Processes alive whose environment names the episode's folder, and zombies of ours."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            is_zombie = state == "Z" and int(parent) == os.getpid()
            if is_zombie or os.fsencode(sandbox.folder) in (folder / "environ").read_bytes():
                found.append(folder.name)
        except (OSError, ValueError):
            continue
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_reply_is_the_result(sandbox: Sandbox) -> None:
    code = (
        "import json, os, sys; line = sys.stdin.readline(); assert sys.stdin.read() == ''; print('noise')\n"
        "reply = json.dumps({'result': json.loads(line)['a']}).encode()\n"
        "os.write(int(os.environ['AGENTRT_REPLY_FD']), reply)"
    )
    result = await python(sandbox, code, {"a": "é\n"})
    assert (result.outcome, result.text, result.exit_code, result.total_bytes) == ("ok", "é\n", 0, 3)


@pytest.mark.parametrize(
    ("reply", "outcome", "text"),
    [
        ('{"result": {"a": [1, 2]}}', "ok", '{"a":[1,2]}'),
        ('{"error": "no such key"}', "tool_error", "no such key"),
        ("14", "tool_error", 'the tool\'s reply is not one JSON line {"result": ...} or {"error": "..."}'),
        ('{"result": NaN}', "tool_error", 'the tool\'s reply is not one JSON line {"result": ...} or {"error": "..."}'),
    ],
)
async def test_kinds_of_reply(sandbox: Sandbox, reply: str, outcome: str, text: str) -> None:
    result = await shell(sandbox, f"printf '%s' '{reply}' > /dev/fd/$AGENTRT_REPLY_FD")
    assert (result.outcome, result.text) == (outcome, text)


async def test_without_a_reply_standard_output_is_the_result(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "echo out; echo err >&2; exit 3")
    assert (result.outcome, result.text, result.stderr, result.exit_code) == ("exit_nonzero", "out\n", "err\n", 3)


async def test_a_signal_is_named(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "kill -11 $$")
    assert (result.outcome, result.exit_code) == ("signal", -11)


async def test_a_program_that_is_not_there_is_infrastructure(sandbox: Sandbox) -> None:
    before = open_files()
    result = await sandbox.call(["/no/such/program"], {}, seconds=1)
    assert (result.outcome, result.text) == ("infra", "/no/such/program: cannot be started: No such file or directory")
    assert open_files() == before


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        (Terms(environment={"A": "x\0y"}), "embedded null byte"),
        (Terms(limits=ToolLimits(address_space_mb=10**15)), "int too large to convert to C long"),
    ],
)
async def test_what_keeps_a_program_from_its_start_is_infrastructure(sandbox: Sandbox, terms: Terms, why: str) -> None:
    result = await sandbox.call(["/bin/true"], {}, seconds=20, terms=terms)
    assert (result.outcome, why in result.text) == ("infra", True), result


@pytest.fixture(scope="module")
def ending(place: Place) -> Path:
    """A program that ends as its request says. Written once: a zygote keeps what it has compiled."""
    program = place.scratch / "ending.py"
    program.write_text("import json, sys\nexec(json.loads(input()))\n")
    return program


@pytest.mark.parametrize(
    ("end", "outcome", "code"),
    [
        ("", "ok", 0),
        ("sys.exit(3)", "exit_nonzero", 3),
        ("raise ValueError", "exit_nonzero", 1),
        ("sys.stderr.close(); raise ValueError", "exit_nonzero", 1),
        ("sys.stdout.close()", "ok", 0),
        ("sys.stdout = None", "ok", 0),
        ("sys.stdout = object()", "exit_nonzero", 120),
        ("import atexit; atexit.register(sys.exit, 5)", "ok", 0),
    ],
)
async def test_a_python_program_ends_as_the_interpreter_ends_it(
    sandbox: Sandbox, ending: Path, end: str, outcome: str, code: int
) -> None:
    argv, terms = [sys.executable, "-I", "-S", str(ending)], Terms(readable=(str(ending),))
    result = await sandbox.call(argv, end, seconds=20, terms=terms)
    assert (result.outcome, result.exit_code) == (outcome, code), result.stderr


async def test_c14_a_background_child_does_not_hold_the_call(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "(sleep 30 &) ; echo hi", seconds=2)
    assert (result.outcome, result.text, result.exit_code) == ("ok", "hi\n", 0)
    assert processes_of(sandbox) == []


async def test_c14_a_call_that_outlives_its_limit_keeps_its_output(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "echo part; sleep 30 & wait", seconds=0.3)
    assert (result.outcome, result.text, result.exit_code) == ("timeout", "part\n", 124)
    assert processes_of(sandbox) == []


@pytest.mark.parametrize("argv", [["cat"], [sys.executable, "-I", "-S"]])
async def test_c14_standard_input_ends(sandbox: Sandbox, argv: list[str]) -> None:
    result = await sandbox.call(argv, 0, seconds=20)
    assert (result.outcome, result.exit_code) == ("ok", 0)
    assert processes_of(sandbox) == []


async def test_children_with_a_session_of_their_own_die_too(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "setsid sh -c 'sleep 31 & setsid sleep 32 & sleep 33' & sleep 0.2; echo x")
    assert result.text == "x\n"
    assert processes_of(sandbox) == []


async def test_cancellation_passes_and_leaves_nothing(sandbox: Sandbox) -> None:
    before = open_files()
    with anyio.move_on_after(0.3) as scope:
        await shell(sandbox, "setsid sleep 34 & trap '' TERM; sleep 35")
    assert scope.cancelled_caught
    assert processes_of(sandbox) == []
    assert open_files() == before


async def test_calls_leak_nothing(sandbox: Sandbox) -> None:
    await shell(sandbox, "true")
    before = open_files()
    async with anyio.create_task_group() as calls:
        for _ in range(40):
            calls.start_soon(shell, sandbox, "echo x")
    assert open_files() == before
    assert processes_of(sandbox) == []


async def test_c16_more_than_the_cap_is_drained(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "head -c 20000000 /dev/zero | tr '\\0' x; exit 0")
    assert (result.outcome, result.exit_code, result.truncated) == ("ok", 0, True)
    assert result.total_bytes == 20_000_000
    assert len(result.text) <= ToolLimits().output_bytes


@pytest.mark.parametrize("size", [9_999, 10_000, 10_001, 16_384])
async def test_c16_the_cap_is_exact(sandbox: Sandbox, size: int) -> None:
    terms = Terms(limits=ToolLimits(output_bytes=10_000))
    result = await sandbox.call(
        ["/bin/sh", "-c", f"head -c {size} /dev/zero | tr '\\0' x"], {}, seconds=20, terms=terms
    )
    assert (result.total_bytes, result.truncated, result.exit_code) == (size, size > 10_000, 0)
    assert len(result.text) == size if size <= 10_000 else len(result.text) <= 10_000
    assert ("bytes left out" in result.text) is result.truncated


async def test_c16_two_hundred_megabytes_are_drained_and_not_kept(sandbox: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await shell(sandbox, "head -c 200000000 /dev/zero; exit 0")
    assert (result.outcome, result.exit_code, result.total_bytes) == ("ok", 0, 200_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


async def test_c15_bytes_that_are_no_text(sandbox: Sandbox) -> None:
    code = "import sys; sys.stdout.buffer.write(bytes.fromhex('636166E9209620FFFE206F6B0A'))"
    result = await python(sandbox, code)
    assert (result.text, result.decode_errors) == ("caf\ufffd \ufffd \ufffd\ufffd ok\n", 4)
    terms = Terms(limits=ToolLimits(output_bytes=100_000))
    argv = [sys.executable, "-I", "-S", "-c", "print('a' * 65_535 + 'é', end='')"]
    cut = await sandbox.call(argv, {}, seconds=20, terms=terms)  # a read of 65,536 bytes splits the last character
    assert (len(cut.text), cut.text[-1], cut.truncated, cut.decode_errors) == (65_536, "é", False, 0)


async def test_c17_the_parents_environment_is_out_of_reach(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VENDOR_THING", "s3cr3t")
    result = await shell(sandbox, "cat /proc/$PPID/environ /proc/1/environ /proc/*/environ; true")
    assert "s3cr3t" not in result.text + result.stderr


async def test_progress_comes_while_a_tool_runs(sandbox: Sandbox) -> None:
    script = 'for line in \'{"progress": 0.5, "eta_s": 3}\' \'{"result": 1}\'; do echo "$line" >&3; sleep 0.1; done'
    heard: list[Progress] = []
    result = await sandbox.call(["/bin/sh", "-c", script], {}, seconds=20, on_progress=heard.append)
    assert (result.outcome, result.text) == ("ok", "1")
    assert heard == [Progress(0.5, 3.0)]


async def test_c17_the_environment_is_an_allow_list(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "s3cr3t")
    result = await sandbox.call(["/usr/bin/env"], {}, seconds=20)
    names = {line.partition("=")[0] for line in result.text.splitlines()}
    assert names == {"PATH", "HOME", "LANG", "TERM", "TMPDIR", "AGENTRT_REPLY_FD"}
    home = "/w" if sandbox.isolation.level is Level.L3 else sandbox.folder
    assert f"HOME={home}\n" in result.text
    assert "s3cr3t" not in result.text


async def test_c14_the_loop_goes_on_while_a_tool_runs(sandbox: Sandbox) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await anyio.sleep(0.01)
            ticks += 1

    async with anyio.create_task_group() as both:
        both.start_soon(tick)
        await shell(sandbox, "sleep 0.5")
        both.cancel_scope.cancel()
    assert ticks >= 5


async def test_the_folder_is_private_shared_by_calls_and_removed() -> None:
    with Sandbox(Permits(1)) as opened:
        folder = opened.folder
        assert folder.stat().st_mode & 0o777 == 0o700
        await shell(opened, "echo kept > here")
        assert (await shell(opened, "cat here")).text == "kept\n"
    assert not folder.exists()


async def test_waiting_for_a_place_is_not_charged(sandbox: Sandbox) -> None:
    with Sandbox(Permits(1)) as narrow:
        results: list[ToolResult] = []

        async def one() -> None:
            results.append(await shell(narrow, "sleep 0.4", seconds=5))

        started = time.monotonic()
        async with anyio.create_task_group() as calls:
            calls.start_soon(one)
            calls.start_soon(one)
        assert time.monotonic() - started >= 0.8
    assert [result.outcome for result in results] == ["ok", "ok"]
    assert sum(result.seconds for result in results) <= time.monotonic() - started


async def test_no_place_is_infrastructure(sandbox: Sandbox) -> None:
    terms = Terms(limits=ToolLimits(queue_seconds=0.1))
    with Sandbox(Permits(1)) as narrow:
        results: list[ToolResult] = []

        async def one() -> None:
            results.append(await narrow.call(["/bin/sleep", "0.4"], {}, seconds=5, terms=terms))

        async with anyio.create_task_group() as calls:
            calls.start_soon(one)
            calls.start_soon(one)
    assert [result.outcome for result in results] == ["infra", "ok"]
    assert (results[0].text, results[0].queue_seconds) == ("there was no place to run it for 0.1 s", 0.1)


async def test_a_reply_that_is_too_long_is_a_limit(sandbox: Sandbox) -> None:
    terms = Terms(limits=ToolLimits(reply_bytes=1000))
    script = 'printf \'{"result": "%02000d"}\n\' 1 >&3; echo out'
    result = await sandbox.call(["/bin/sh", "-c", script], {}, seconds=20, terms=terms)
    assert (result.outcome, result.text) == ("output", "the tool's reply has more than 1000 bytes")


def test_no_process_in_virtual_time(virtual_time: tuple[str, dict[str, object]]) -> None:
    async def start() -> None:
        with pytest.raises(RuntimeError, match="virtual time"), Sandbox(Permits(1)) as sandbox:
            await sandbox.call(["true"], {}, seconds=1)

    backend, options = virtual_time
    anyio.run(start, backend=backend, backend_options=options)
