"""A group: the episodes of one task, and what their rewards say of each other."""

import statistics
from collections.abc import Sequence

from agentrt.core.records import GroupRecord


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
    if not valid or min(valid) == max(valid):
        return [None if reward is None else 0.0 for reward in rewards]
    mean, deviation = statistics.fmean(valid), statistics.pstdev(valid)
    return [None if reward is None else (reward - mean) / deviation for reward in rewards]
