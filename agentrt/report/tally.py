"""`Tally`: what has ended so far, for a display."""

import time

from agentrt.core.records import EpisodeRecord


class Tally:
    """Counts over the records of this process."""

    def __init__(self, *, groups: int = 0, episodes: int = 0) -> None:
        self.groups, self.episodes = groups, episodes
        """That there are to run: of a resumed run, what was left."""
        self.ended_groups = self.ended = self.failed = self.turns = self.sampled = self.scored = 0
        self.reward_sum = 0.0
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._started

    @property
    def reward(self) -> float | None:
        """The mean so far."""
        return self.reward_sum / self.scored if self.scored else None

    def add(self, record: EpisodeRecord) -> None:
        """Count one attempt."""
        self.ended += 1
        self.failed += record.error is not None
        self.turns += sum(len(branch.turns) for branch in record.branches)
        self.sampled += sum(branch.mask.count(1) for branch in record.branches)
        if record.reward is not None:
            self.scored += 1
            self.reward_sum += record.reward
