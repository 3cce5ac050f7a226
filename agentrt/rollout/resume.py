"""What is left to run, given what a run's file holds. Pure: records in, plans out.

An episode is done when its file has a good record of it. A task that is scored as a group is done when all its members
have a good record of the same attempt, for they were scored together; otherwise the whole group is run again. Attempts
are counted over all records, failures included, so no seed is used twice.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from agentrt.core.records import EpisodeRecord, GroupRecord
from agentrt.env.task import Task
from agentrt.rollout.group import group_record


class Member(NamedTuple):
    """One attempt to be made."""

    member: int
    attempt: int


class GroupPlan(NamedTuple):
    """What is left of one group: the members to run, and the rewards of all (those to run have none yet)."""

    task: Task
    members: list[Member]
    rewards: list[float | None]


class Seen:
    """What the file says of one episode."""

    __slots__ = ("good_attempt", "last_attempt", "reward")

    def __init__(self) -> None:
        self.last_attempt = self.good_attempt = -1
        self.reward: float | None = None
        """Of the good attempt."""


class Ledger:
    """What the file says of each episode: attempts, the good one, its reward. Holds no tokens."""

    def __init__(self, records: Iterable[EpisodeRecord] = ()) -> None:
        self._seen: dict[tuple[str, int], Seen] = {}
        for record in records:
            self.add(record)

    def add(self, record: EpisodeRecord) -> None:
        """Note one record."""
        seen = self._seen.setdefault(record.key, Seen())
        seen.last_attempt = max(seen.last_attempt, record.attempt)
        if record.status == "ok" and record.attempt > seen.good_attempt:
            seen.good_attempt, seen.reward = record.attempt, record.reward

    def seen(self, task_id: str, member: int) -> Seen:
        """What there is of one episode; both attempts are -1 if there is nothing."""
        return self._seen.get((task_id, member), Seen())

    def left(self, tasks: Iterable[Task], group_size: int, *, as_group: bool) -> list[GroupPlan]:
        """The groups with something left to run, in task order. `as_group`: the tasks have group rewards."""
        plans = (self._plan(task, group_size, as_group) for task in tasks)
        return [plan for plan in plans if plan.members]

    def again(self, task: Task, group_size: int) -> GroupPlan:
        """The whole group of a task, once more if it was there: an attempt after all seen, or planned by this, so far."""
        seen = [self._seen.setdefault((task.id, member), Seen()) for member in range(group_size)]
        attempt = max(one.last_attempt for one in seen) + 1
        for one in seen:
            one.last_attempt = attempt
        return GroupPlan(task, [Member(member, attempt) for member in range(group_size)], [None] * group_size)

    def groups(self, tasks: Iterable[Task], group_size: int, *, as_group: bool) -> list[GroupRecord]:
        """The records of the groups that have nothing left to run, in task order."""
        plans = (self._plan(task, group_size, as_group) for task in tasks)
        return [group_record(plan.task.id, plan.rewards) for plan in plans if not plan.members]

    def _plan(self, task: Task, group_size: int, as_group: bool) -> GroupPlan:
        seen = [self.seen(task.id, member) for member in range(group_size)]
        if not as_group:
            members = [Member(n, one.last_attempt + 1) for n, one in enumerate(seen) if one.good_attempt < 0]
        elif _is_whole(seen):
            members = []
        else:
            attempt = max(one.last_attempt for one in seen) + 1
            members = [Member(n, attempt) for n in range(group_size)]
        again = {member.member for member in members}
        return GroupPlan(task, members, [None if n in again else one.reward for n, one in enumerate(seen)])


def _is_whole(seen: Sequence[Seen]) -> bool:
    """All members have a good record, and of one attempt."""
    return seen[0].good_attempt >= 0 and len({one.good_attempt for one in seen}) == 1
