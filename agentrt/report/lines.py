"""Progress of a run as plain lines: one for each group that ends, and one a minute when none does."""

import time
from collections.abc import Callable, Collection
from typing import TextIO

import anyio

from agentrt.core.protocol import EngineStatistics
from agentrt.core.records import EpisodeRecord, GroupRecord
from agentrt.report.failures import failure_line, one_line
from agentrt.report.running import RunningEpisode, by_phase, slowest
from agentrt.report.tally import Tally

QUIET_SECONDS = 60.0


class ProgressLines:
    """Told of episodes and groups as they end (`rollout.dispatcher.Observer`); writes to `out`."""

    def __init__(self, out: TextIO) -> None:
        self._out, self.tally = out, Tally()
        self._spoke = time.monotonic()

    def run_started(self, groups: int, episodes: int) -> None:
        self.tally = Tally(groups=groups, episodes=episodes)

    def episode_started(self, task_id: str, member: int) -> None:
        """Nothing to say: a line an episode would be too many."""

    def episode_ended(self, record: EpisodeRecord) -> None:
        self.tally.add(record)
        if record.error is not None:
            self._say(failure_line(record))

    def group_ended(self, group: GroupRecord) -> None:
        tally = self.tally
        tally.ended_groups += 1
        rewards = " ".join("–" if reward is None else f"{reward:g}" for reward in group.rewards)
        self._say(
            f"group {tally.ended_groups}/{tally.groups}  {one_line(group.task_id)}  rewards {rewards}  ·  "
            f"{tally.ended}/{tally.episodes} episodes, {tally.failed} failed, {tally.sampled / tally.seconds:.0f} tokens/s"
        )

    async def follow(self, running: Collection[RunningEpisode], statistics: Callable[[], EngineStatistics]) -> None:
        """Say what runs whenever nothing else was said for a minute. Ends when it is cancelled."""
        while True:
            await anyio.sleep(QUIET_SECONDS / 4)
            oldest = slowest(running)
            if oldest is not None and time.monotonic() - self._spoke >= QUIET_SECONDS:
                now = anyio.current_time()
                phases = ", ".join(f"{count} {phase}" for phase, count in by_phase(running).items())
                self._say(
                    f"running: {phases}  ·  slowest: {one_line(oldest.label)} for {now - oldest.started:.0f} s, "
                    f"turn {oldest.turns}, {oldest.phase} for {now - oldest.phase_since:.0f} s"
                )

    def _say(self, line: str) -> None:
        self._spoke = time.monotonic()
        print(line, file=self._out, flush=True)
