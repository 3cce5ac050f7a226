"""A group: the episodes of one task, what their rewards say of each other, and the rows they make for a trainer."""

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

from agentrt.core.records import EpisodeRecord, GroupRecord
from agentrt.rollout.batch import Padded, Ragged, Row, padded, ragged, row_of


class Group(NamedTuple):
    """A group that has ended."""

    record: GroupRecord
    episodes: Sequence[EpisodeRecord]
    """In member order, failures included."""
    stale: frozenset[int] = frozenset()
    """Members that are too old to be trained on. Their rewards still count in the others' advantages."""

    def rows(self) -> list[Row]:
        """A row for each branch with a sampled token, of each member with an advantage that is not stale."""
        members = zip(self.episodes, self.record.advantages, strict=True)
        return [
            row_of(episode, branch, advantage)
            for episode, advantage in members
            if advantage is not None and episode.member not in self.stale
            for branch in episode.branches
            if 1 in branch.mask
        ]

    @overload
    def to_batch(self, layout: Literal["padded"] = "padded") -> Padded: ...
    @overload
    def to_batch(self, layout: Literal["ragged"]) -> Ragged: ...
    def to_batch(self, layout: Literal["padded", "ragged"] = "padded") -> Padded | Ragged:
        """The rows as one batch. For several groups: `padded([row for group in groups for row in group.rows()])`."""
        return padded(self.rows()) if layout == "padded" else ragged(self.rows())

    def older_than(self, version: int) -> "Group":
        """This group with the members marked stale that have a token of a policy before `version`."""
        old = {one.member for one in self.episodes if (oldest := oldest_version(one)) is not None and oldest < version}
        return self._replace(stale=self.stale | old)

    @property
    def has_signal(self) -> bool:
        """True if its members' rewards differ: otherwise all advantages are 0 and nothing is learned from it."""
        return any(self.record.advantages)


def oldest_version(episode: EpisodeRecord) -> int | None:
    """The oldest policy that sampled a token of an episode; None if nothing was sampled."""
    return min((version for branch in episode.branches for version in branch.versions if version >= 0), default=None)


def num_sampled(episode: EpisodeRecord) -> int:
    """Sampled tokens of an episode, over all its branches."""
    return sum(branch.mask.count(1) for branch in episode.branches)


class Peers:
    """The members of a group, for what its episodes say of themselves to the engine."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left
        """How many have not ended."""


def group_record(task_id: str, rewards: Sequence[float | None]) -> GroupRecord:
    """The record of a group, rewards in member order; null for a member without one, which counts for nothing.

    Advantages are (reward - mean) / population standard deviation over the valid members; 0 where all are equal, also
    for a single one. A group without a valid member has failed: `valid` is 0, and it yields no rows.
    """
    return GroupRecord(
        task_id=task_id,
        members=len(rewards),
        valid=sum(reward is not None for reward in rewards),
        rewards=list(rewards),
        advantages=advantages(rewards),
    )


def advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """The normalised advantage of each member; None for one without a reward."""
    valid = [reward for reward in rewards if reward is not None]
    deviation = statistics.pstdev(valid) if valid else 0.0
    if not deviation:  # all are equal, or as good as that
        return [None if reward is None else 0.0 for reward in rewards]
    mean = statistics.fmean(valid)
    return [None if reward is None else (reward - mean) / deviation for reward in rewards]
