"""`agentrt tools`: what it prints and how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from agentrt.cli.isolation import report
from agentrt.sandbox.level import Isolation, Level
from agentrt.sandbox.probe import DENIED


def agentrt(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "agentrt", *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_the_list_names_every_tool() -> None:
    code, out, _ = agentrt("tools", "list")
    names = [line.split()[0] for line in out.splitlines()]
    assert (code, names) == (0, sorted(names))
    assert {"calculator", "files", "kv", "python", "repl", "search", "shell"} <= set(names)


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (("calculator", '{"expression": "2 * 3"}'), 0, "6\n", "ok in "),
        (("python", '{"code": "1 / 0"}'), 1, "Traceback", "agentrt: tool_error in "),
        (("calculator", "[]"), 2, "", "agentrt: the arguments are no JSON object"),
        (("calculator", '{"expr": 1}'), 2, "", "agentrt: arguments: "),
        (("calculater",), 2, "", "did you mean 'calculator'?"),
        (("calculator", "--seconds", "nan"), 2, "", "agentrt: --seconds must be above 0, not nan"),
        (("calculator", "--seconds", "-1"), 2, "", "agentrt: --seconds must be above 0, not -1"),
    ],
)
def test_a_call(arguments: tuple[str, ...], code: int, out: str, err: str) -> None:
    ended, printed, said = agentrt("tools", "call", *arguments)
    assert ended == code, said
    assert printed.startswith(out)
    assert err in said


def test_a_check_says_what_holds(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\ndescription = "d"\n[limits]\nwall_seconds = 3\n[parameters]\ntype = "object"\n'
    )
    code, out, _ = agentrt("tools", "check", str(tmp_path / "mine.py"))
    assert code == 0
    assert "limit      wall_seconds 3" in out
    assert "isolation  L" in out


def test_a_report_names_causes_and_fixes() -> None:
    limits = {"wall": "all processes", "memory": "all processes (polled)"}
    isolation = Isolation(
        level=Level.L2,
        layers=dict.fromkeys(DENIED, "enforced"),
        limits=limits,
        reasons=("L3: unshare: no",),
        fixes=("allow it",),
    )
    assert report(isolation).splitlines()[2 + len(DENIED) :] == [
        "held for   wall: all processes",
        "held for   memory: all processes (polled)",
        "not more   L3: unshare: no",
        "fix        allow it",
    ]
