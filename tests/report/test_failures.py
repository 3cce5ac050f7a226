"""What went wrong, in lines that a terminal holds, however long and hostile the message is."""

import io

import msgspec
import pytest
from rich.console import Console

from agentrt.core.records import CallRecord, EpisodeRecord, Failure, StopReason
from agentrt.report.failures import LINE_CHARACTERS, cause_lines, failure_line, one_line
from agentrt.report.summary import render, summarise


def failed(message: str, member: int = 0) -> EpisodeRecord:
    return EpisodeRecord(
        task_id="t", member=member, attempt=0, seed=1, status="error", stop_reason=StopReason.ERROR, truncated=False,
        reward=None, error=Failure(boundary="environment", type="KeyError", message=message, traceback="..."),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("two\n  lines\tand tabs", "two lines and tabs"),
        ("\x1b[2J\x07 gone", "\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER} gone"),
        ("x" * LINE_CHARACTERS, "x" * LINE_CHARACTERS),
        ("x" * 10_000_000, "x" * LINE_CHARACTERS + "…"),
        ("", ""),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line


def test_a_failure_is_one_line() -> None:
    assert failure_line(failed("no\nkey")) == "failed: t member 0: environment: KeyError: no key"


def test_the_most_frequent_causes_are_shown() -> None:
    counts = {f"cause {n}": n for n in range(1, 9)}
    assert list(cause_lines(counts)) == [
        "8 × cause 8", "7 × cause 7", "6 × cause 6", "5 × cause 5", "4 × cause 4", "6 × something else, 3 causes",
    ]  # fmt: skip
    assert list(cause_lines({"one": 2})) == ["2 × one"]
    assert list(cause_lines({})) == []


def test_the_summary_says_where_tracebacks_are_and_stays_on_a_screen() -> None:
    out = io.StringIO()
    records = [failed(f"key {member}", member) for member in range(1000)]
    Console(file=out, width=100).print(render(summarise(records, 1000, ()), 1.0, 0, "out"))
    shown = [line.strip() for line in out.getvalue().splitlines()]
    assert shown.count("995 × something else, 995 causes") == 1
    assert shown.count("where: `error.traceback` of the records") == 1
    assert len(shown) < 20


def test_a_metrics_name_is_no_markup() -> None:
    out = io.StringIO()
    record = EpisodeRecord(
        task_id="t", member=0, attempt=0, seed=1, status="ok", stop_reason=StopReason.COMPLETED, truncated=False,
        reward=1.0, metrics={"accuracy[train]": 1.0, "size[/x]": 2.0},
    )  # fmt: skip
    Console(file=out, width=100).print(render(summarise([record], 1, ()), 1.0, 0, "out"))
    shown = [line.split() for line in out.getvalue().splitlines()]
    assert ["accuracy[train]", "1.000", "(metric)"] in shown
    assert ["size[/x]", "2.000", "(metric)"] in shown


def test_the_summary_says_where_the_traceback_of_a_grader_is() -> None:
    out = io.StringIO()
    record = EpisodeRecord(
        task_id="t", member=0, attempt=0, seed=1, status="ok", stop_reason=StopReason.COMPLETED, truncated=False,
        reward=None, reward_reason="reward_raised: KeyError: 'x'",
    )  # fmt: skip
    Console(file=out, width=100).print(render(summarise([record], 1, ()), 1.0, 0, "out"))
    shown = [line.strip() for line in out.getvalue().splitlines()]
    assert "not scored: 1 × reward_raised: KeyError: 'x'" in shown
    assert "where: `reward_raised` in logs/agentrt.jsonl" in shown


def test_what_did_not_run_has_not_failed() -> None:
    """A run of 16 episodes: one good, one good at its second attempt, one that failed twice, 13 not begun."""
    good = msgspec.structs.replace(failed(""), status="ok", error=None, stop_reason=StopReason.COMPLETED)
    records = [good, failed("x", 1), msgspec.structs.replace(good, member=1, attempt=1), failed("x", 2), failed("x", 2)]
    summary = summarise(records, 16, ())
    assert (summary.good, summary.failed, summary.not_run) == (2, 1, 13)
    out = io.StringIO()
    Console(file=out, width=100).print(render(summary, 1.0, 0, "out"))
    assert "2 good, 1 failed, 13 not run of 16" in out.getvalue()


def test_names_that_a_policy_invents_are_counted_together() -> None:
    """A malformed call's name is whatever was sampled: with line ends, it tore the table."""
    calls = [
        CallRecord(turn=0, name=name, arguments={}, outcome=outcome, result="")
        for name, outcome in (
            ("search", "ok"),
            ("search", "malformed"),
            ("se\n{", "malformed"),
            ("find", "unknown_tool"),
        )
    ]
    record = msgspec.structs.replace(failed(""), status="ok", error=None, calls=calls)
    summary = summarise([record], 1, ["search"])
    assert summary.tools == {"other names": {"malformed": 1, "unknown_tool": 1}, "search": {"ok": 1, "malformed": 1}}


def test_the_rate_is_of_what_was_just_run() -> None:
    """A resumed run has the records of before, and the time of what was left."""
    out = io.StringIO()
    Console(file=out, width=100).print(render(summarise([], 1, ()), 2.0, 100, "out"))
    assert "0 sampled (50/s)" in out.getvalue()
