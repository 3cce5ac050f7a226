"""What a person sees while a run goes on, on a terminal and elsewhere."""

import io
from typing import Any

import anyio
import pytest
from rich.console import Console

from agentrt.core.protocol import EngineStatistics
from agentrt.core.records import EpisodeRecord, Failure, GroupRecord, StopReason
from agentrt.report.lines import ProgressLines
from agentrt.report.live import LiveProgress, render
from agentrt.report.running import Phase
from agentrt.report.tally import Tally


class Running:
    """An episode as a display sees it."""

    def __init__(self, label: str, phase: Phase, started: float, since: float, tool: str = "") -> None:
        self.label, self.phase, self.started, self.phase_since = label, phase, started, since
        self.turns, self.tool_name = 2, tool


RUNNING = [
    Running("t[1] member 0", "tools", 10.0, 12.0, "search"), Running("t2 member 0", "model", 11.0, 13.0),
    Running("t2 member 1", "tools", 11.5, 11.5, "kv"),
]  # fmt: skip
STATISTICS = EngineStatistics(
    running=1, waiting=4, pages_total=200, pages_free=50, pages_cached=20, tokens_sampled=7, tokens_reused=9
)


def ended(reward: float | None, failure: Failure | None = None) -> EpisodeRecord:
    return EpisodeRecord(
        task_id="t", member=0, attempt=0, seed=0, status="error" if failure else "ok", error=failure,
        stop_reason=StopReason.COMPLETED, truncated=False, reward=reward,
    )  # fmt: skip


FAILURE = Failure(boundary="environment", type="ValueError", message="bad [red] state")


def text_of(drawing: Any) -> str:
    console = Console(record=True, width=120)
    console.print(drawing)
    return console.export_text()


def test_the_live_lines_say_what_runs_and_what_is_slow() -> None:
    tally = Tally(groups=2, episodes=8)
    for reward in (1.0, 0.0, None):
        tally.add(ended(reward))
    tally.add(ended(None, FAILURE))
    lines = text_of(render(tally, RUNNING, STATISTICS, 15.0)).splitlines()
    assert "4/8" in lines[0]
    assert "1 failed" in lines[0]
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:]}
    assert found["running"] == "2 tools, 1 model · 6 turns in them"
    assert found["engine"] == "1 sampling, 4 queued · KV 75% of 200 pages, 20 only cached"
    assert found["reward"] == "0.500 so far, 2 scored"
    assert found["tools"] == "2 wait, longest kv for 3.5 s"
    assert found["slowest"] == "t[1] member 0: 5.0 s, turn 2, tools for 3.0 s"


def test_the_live_lines_before_anything_runs() -> None:
    found = text_of(render(Tally(groups=1, episodes=1), [], EngineStatistics(), 0.0))
    assert "none yet" in found
    assert "KV –" in found


@pytest.mark.anyio
async def test_a_failure_is_printed_above_the_live_lines() -> None:
    out = io.StringIO()
    with LiveProgress(Console(file=out, force_terminal=True, highlight=False, width=100)) as live:
        live.run_started(1, 2)
        with anyio.move_on_after(0.05):
            await live.follow(RUNNING, lambda: STATISTICS)
        live.episode_ended(ended(None, FAILURE))
        live.group_ended(GroupRecord(task_id="t", members=1, valid=0, rewards=[None], advantages=[None]))
    assert "slowest" in out.getvalue()
    assert "failed: t member 0: environment: ValueError: bad [red] state" in out.getvalue()


def test_plain_lines_say_each_group_and_each_failure() -> None:
    out = io.StringIO()
    lines = ProgressLines(out)
    lines.run_started(1, 2)
    lines.episode_ended(ended(1.0))
    lines.episode_ended(ended(None, FAILURE))
    task_id = "a task\nof two lines \x1b[2J"
    lines.group_ended(GroupRecord(task_id=task_id, members=2, valid=1, rewards=[1.0, None], advantages=[0.0, None]))
    failed, group = out.getvalue().splitlines()
    assert failed == "failed: t member 0: environment: ValueError: bad [red] state"
    assert group.startswith("group 1/1  a task of two lines �[2J  rewards 1 –  ·  2/2 episodes, 1 failed, ")


def test_plain_lines_name_the_slowest_when_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    lines = ProgressLines(out)
    monkeypatch.setattr("agentrt.report.lines.QUIET_SECONDS", 0.0)

    async def main() -> None:
        now = anyio.current_time()
        stuck = Running("t member 3", "tools", now, now + 1, "search")
        with anyio.move_on_after(0.01):
            await lines.follow([stuck], EngineStatistics)

    anyio.run(main, backend="asyncio")
    assert "running: 1 tools  ·  slowest: t member 3 for " in out.getvalue().splitlines()[0]
