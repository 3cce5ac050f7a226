"""The shipped tools as the runtime runs them, in the sandbox of this machine."""

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrt import tool
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox
from agentrt_tools.files import FilesError, answer

Call = tuple[str, dict[str, Any]]


def run(*calls: Call, seconds: float = 20) -> list[ToolResult]:
    """The calls of one episode, one after the other."""

    async def main() -> list[ToolResult]:
        with Sandbox(Permits(1)) as sandbox:
            found = [tool(name) for name, _ in calls]
            return [
                await sandbox.call(each.argv, request, seconds=seconds, terms=each.terms)
                for each, (_, request) in zip(found, calls, strict=True)
            ]

    return anyio.run(main)


def code(text: str, name: str = "python") -> Call:
    return name, {"code": text}


@pytest.mark.parametrize(
    ("call", "outcome", "text"),
    [
        (("calculator", {"expression": "2 * (3 + 4)"}), "ok", "14"),
        (("calculator", {"expression": "1 / 0"}), "tool_error", "division by zero"),
        (code("x = 20\nx + 1"), "ok", "21\n"),
        (code("print('a')\n'b'"), "ok", "a\n'b'\n"),
        (code("import sys; sys.exit(3)"), "exit_nonzero", ""),
        (code("import os; os.kill(os.getpid(), 9)"), "signal", ""),
        (("shell", {"command": "echo out; echo err >&2; exit 4"}), "exit_nonzero", "out\nerr\n"),
        (("shell", {"command": "cat; pwd | wc -l"}), "ok", "1\n"),
        (("files", {"op": "read", "path": "../../etc/passwd"}), "tool_error", None),
    ],
)
def test_a_call(call: Call, outcome: str, text: str | None) -> None:
    (result,) = run(call)
    assert result.outcome == outcome, result
    assert text is None or result.text == text
    assert result.isolation.startswith("L")


def test_an_exception_is_shown_as_python_shows_it() -> None:
    (result,) = run(code("def f():\n    return 1 / 0\nf()"))
    assert (result.outcome, result.exit_code) == ("tool_error", 0)
    assert result.text == (
        'Traceback (most recent call last):\n  File "<code>", line 3, in <module>\n  File "<code>", line 2, in f\n'
        "ZeroDivisionError: division by zero\n"
    )


def test_a_program_ends_as_python_ends_one() -> None:
    """Though it runs in a fork: threads are waited for, then what it has registered is run."""
    text = """
import atexit, threading, time
atexit.register(print, "last")
threading.Thread(target=lambda: (time.sleep(0.1), print("late"))).start()
print("first")"""
    (result,) = run(code(text))
    assert (result.outcome, result.text) == ("ok", "first\nlate\nlast\n")


def test_files_and_python_share_the_folder() -> None:
    results = run(
        ("files", {"op": "write", "path": "src/a.py", "content": "x = 1\ny = 2\nz = 3\n"}),
        ("files", {"op": "edit", "path": "src/a.py", "old": "y = 2", "new": "y = 5"}),
        ("files", {"op": "read", "path": "src/a.py", "start": 2, "lines": 1}),
        ("files", {"op": "list"}),
        ("shell", {"command": "wc -l < src/a.py"}),
        code("exec(open('src/a.py').read()); x + y + z"),
    )
    assert [result.text for result in results] == ["ok", "ok", "y = 5\n", "src/", "3\n", "9\n"]


def test_files_refuses_what_it_cannot_do(tmp_path: Any) -> None:
    folder = str(tmp_path)
    (tmp_path / "a").write_text("x x")
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "out").symlink_to("/etc")
    for call, words in [
        ({"op": "move"}, "op is one of"),
        ({"op": "read", "path": "out/passwd"}, "outside of the working directory"),
        ({"op": "read", "path": "none"}, "no such file"),
        ({"op": "read", "path": "bytes"}, "is no text"),
        ({"op": "read", "path": "a", "start": 0}, "start is a number from 1 on"),
        ({"op": "edit", "path": "a", "old": "x", "new": "y"}, "old is there 2 times"),
        ({"op": "edit", "path": "a", "old": "", "new": "y"}, "old is there 0 times"),
        ({"op": "write", "path": "a"}, "content is missing"),
        ({"op": "write", "path": "a/b", "content": ""}, "a/b: "),
    ]:
        with pytest.raises(FilesError, match=words):
            answer(call, folder)


def test_a_session_keeps_what_it_defines() -> None:
    results = run(
        code("x = 1\nimport subprocess", "repl"),
        code("print(x); subprocess.run(['/bin/echo', 'child']).returncode", "repl"),
        code("x += 1\nprint('said'); 1 / 0", "repl"),
        code("x", "repl"),
    )
    assert [result.outcome for result in results] == ["ok", "ok", "tool_error", "ok"]
    assert (results[0].text, results[3].text) == ("", "2\n")
    assert sorted(results[1].text.splitlines()) == ["0", "1", "child"]
    assert results[2].text.startswith("said\nTraceback")


def test_a_session_that_dies_or_hangs_starts_again() -> None:
    results = run(
        code("x = 1", "repl"), code("import os; os._exit(7)", "repl"), code("x", "repl"),
        code("while True: pass", "repl"), code("print('x' in globals(), 'y' * 3)", "repl"), seconds=1.5,
    )  # fmt: skip
    assert [result.outcome for result in results] == ["ok", "exit_nonzero", "tool_error", "timeout", "ok"]
    assert (results[1].exit_code, results[4].text) == (7, "False yyy\n")
    assert "NameError" in results[2].text


def test_large_requests_and_results_of_a_session() -> None:
    results = run(code(f"x = {'1' * 3000!r} * 100\nlen(x)  # {'c' * 300_000}", "repl"), code("print(x)", "repl"))
    assert results[0].text == "300000\n"
    assert (results[1].total_bytes, results[1].truncated) == (300_001, True)


def test_two_writes_side_by_side_are_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their sandboxes, both are process 2."""
    put = os.replace

    def late(draft: str, path: str) -> None:
        monkeypatch.setattr(os, "replace", put)
        answer({"op": "write", "path": "a", "content": "first to end"}, str(tmp_path))
        put(draft, path)

    monkeypatch.setattr(os, "replace", late)
    assert answer({"op": "write", "path": "a", "content": "last to end"}, str(tmp_path)) == "ok"
    assert (tmp_path / "a").read_text() == "last to end"
    assert os.listdir(tmp_path) == ["a"]


def test_names_that_are_no_text_are_listed() -> None:
    calls = [("shell", {"command": "touch a $(printf 'b\\377')"}), ("files", {"op": "list"})]
    assert [result.text for result in run(*calls)] == ["", "a\nb\ufffd"]
