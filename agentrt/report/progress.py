"""Progress of a run as plain lines, one for each group that ends."""

import time
from typing import TextIO

from agentrt.core.records import EpisodeRecord, GroupRecord


class ProgressLines:
    """Told of episodes and groups as they end (`rollout.dispatcher.Observer`); writes to `out`."""

    def __init__(self, out: TextIO, *, groups: int, episodes: int) -> None:
        self._out, self._groups, self._episodes = out, groups, episodes
        self._started = time.perf_counter()
        self._ended_groups = self._ended = self._failed = self._tokens = 0

    def episode_started(self, task_id: str, member: int) -> None:
        """Nothing to say: a line an episode would be too many."""

    def episode_ended(self, record: EpisodeRecord) -> None:
        self._ended += 1
        self._tokens += sum(branch.mask.count(1) for branch in record.branches)
        if record.error is not None:
            self._failed += 1
            where = f"{record.task_id} member {record.member}"
            self._say(f"failed: {where}: {record.error.boundary}: {record.error.type}: {record.error.message}")

    def group_ended(self, group: GroupRecord) -> None:
        self._ended_groups += 1
        rewards = " ".join("–" if reward is None else f"{reward:g}" for reward in group.rewards)
        seconds = time.perf_counter() - self._started
        self._say(
            f"group {self._ended_groups}/{self._groups}  {group.task_id}  rewards {rewards}  ·  "
            f"{self._ended}/{self._episodes} episodes, {self._failed} failed, {self._tokens / seconds:.0f} tokens/s"
        )

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)
