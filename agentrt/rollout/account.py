"""What became of everything that was sampled for a trainer: each group, episode and token ends in one state."""

from collections import Counter
from enum import StrEnum

from agentrt.rollout.group import Group, num_sampled


class Fate(StrEnum):
    """What became of a group."""

    TAKEN = "taken"
    """The trainer has it."""
    FILTERED = "filtered"
    """Its rewards are all equal."""
    STALE = "stale"
    """Too old when the trainer asked for it."""
    FAILED = "failed"
    """It has no reward."""
    UNUSED = "unused"
    """It has ended, and the trainer has not asked for it."""


class Account:
    """Counts by fate. An episode has the fate of its group, but for one that is itself stale or has no reward."""

    def __init__(self) -> None:
        self.groups: Counter[Fate] = Counter()
        self.episodes: Counter[Fate] = Counter()
        self.tokens: Counter[Fate] = Counter()
        """Sampled ones."""

    def __repr__(self) -> str:
        return f"<Account {', '.join(f'{count} {fate}' for fate, count in self.groups.items() if count)}>"

    def add(self, group: Group, fate: Fate) -> None:
        """Count a group that has ended."""
        self._count(group, fate, 1)

    def move(self, group: Group, fate: Fate) -> None:
        """Count a group that was unused as something else; some of its members may have become stale meanwhile."""
        self._count(group._replace(stale=frozenset()), Fate.UNUSED, -1)
        self._count(group, fate, 1)

    def _count(self, group: Group, fate: Fate, sign: int) -> None:
        self.groups[fate] += sign
        for episode, reward in zip(group.episodes, group.record.rewards, strict=True):
            own = Fate.FAILED if reward is None else Fate.STALE if episode.member in group.stale else fate
            self.episodes[own] += sign
            self.tokens[own] += sign * num_sampled(episode)
