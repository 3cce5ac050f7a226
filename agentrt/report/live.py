"""Progress of a run on a terminal: a few lines that are drawn again four times a second, failures above them."""

from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self

import anyio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from agentrt.core.protocol import EngineStatistics
from agentrt.core.records import EpisodeRecord, GroupRecord
from agentrt.report.failures import failure_line, one_line
from agentrt.report.running import RunningEpisode, by_phase, slowest
from agentrt.report.tally import Tally

REFRESH_SECONDS = 0.25
BAR_WIDTH = 32


class LiveProgress:
    """As `ProgressLines`, for a terminal. A context manager: what is written to the terminal inside it goes above."""

    def __init__(self, console: Console) -> None:
        self.tally = Tally()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def run_started(self, groups: int, episodes: int) -> None:
        self.tally = Tally(groups=groups, episodes=episodes)

    def episode_started(self, task_id: str, member: int) -> None:
        """Seen at the next drawing."""

    def episode_ended(self, record: EpisodeRecord) -> None:
        self.tally.add(record)
        if record.error is not None:
            self._live.console.print(escape(failure_line(record)), style="red")

    def group_ended(self, group: GroupRecord) -> None:
        self.tally.ended_groups += 1

    async def follow(self, running: Collection[RunningEpisode], statistics: Callable[[], EngineStatistics]) -> None:
        """Draw until it is cancelled."""
        while True:
            drawing = render(self.tally, running, statistics(), anyio.current_time())
            self._live.update(drawing, refresh=True)
            await anyio.sleep(REFRESH_SECONDS)


def render(tally: Tally, running: Collection[RunningEpisode], engine: EngineStatistics, now: float) -> RenderableType:
    """The lines, at `now` on the event loop's clock."""
    table = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=tally.episodes, completed=tally.ended, width=BAR_WIDTH)
    table.add_row("episodes", f"{tally.ended}/{tally.episodes}", bar, f"{tally.failed} failed", _clock(tally.seconds))
    rows = {
        "running": _running(running),
        "engine": f"{engine.running} sampling, {engine.waiting} queued  ·  KV {_kv(engine)}",
        "tokens": f"{engine.tokens_sampled / tally.seconds:.0f}/s  ·  {engine.tokens_sampled} sampled, "
        f"{engine.tokens_prefilled} prefilled, {engine.tokens_reused} reused{_again(engine)}",
        "reward": "none yet" if tally.reward is None else f"{tally.reward:.3f} so far, {tally.scored} scored",
        "tools": _tools(running, now),
        "slowest": _slowest(running, now),
    }
    lines = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        lines.add_row(f"[dim]{name}[/dim]", escape(text))
    return Group(table, lines)


def _running(running: Collection[RunningEpisode]) -> str:
    turns = sum(episode.turns for episode in running)
    phases = ", ".join(f"{count} {phase}" for phase, count in by_phase(running).items())
    return f"{phases or 'none'}  ·  {turns} turns in them"


def _again(engine: EngineStatistics) -> str:
    return f", {engine.tokens_reprefilled} computed again" if engine.tokens_reprefilled else ""


def _kv(engine: EngineStatistics) -> str:
    if not engine.pages_total:
        return "–"
    used = engine.pages_total - engine.pages_free
    device = f"{used / engine.pages_total:.0%} of {engine.pages_total} pages, {engine.pages_cached} only cached"
    if engine.pages_pinned:
        device += f", {engine.pages_pinned} pinned"
    if engine.host_pages_free == engine.host_pages_total:
        return device
    used = engine.host_pages_total - engine.host_pages_free
    return f"{device}; host {used / engine.host_pages_total:.0%}, {engine.sessions_parked} parked"


def _tools(running: Collection[RunningEpisode], now: float) -> str:
    waiting = [episode for episode in running if episode.phase == "tools"]
    if not waiting:
        return "none runs"
    longest = min(waiting, key=lambda episode: episode.phase_since)
    return f"{len(waiting)} wait, longest {longest.tool_name} for {now - longest.phase_since:.1f} s"


def _slowest(running: Collection[RunningEpisode], now: float) -> str:
    oldest = slowest(running)
    if oldest is None:
        return "–"
    since = f"{oldest.phase} for {now - oldest.phase_since:.1f} s"
    return f"{one_line(oldest.label)}: {now - oldest.started:.1f} s, turn {oldest.turns}, {since}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
