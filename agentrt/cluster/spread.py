"""`spread`: the episodes of a run over workers, some at a time, each group to its end, all records in one sink.

What a worker is given is one episode; where a task has group rewards, its whole group, which is scored together. A worker
that is lost costs what it was playing: another one plays that again, as the same attempt with the same seed, since no
record of it was made. What loses a second worker is recorded as failed, for it may be what kills them.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import anyio
import structlog

from agentrt.core import seeds
from agentrt.core.records import EpisodeRecord, Failure, StopReason
from agentrt.core.spec import RunSpec
from agentrt.env.environment import Environment
from agentrt.env.rubric import Rubric
from agentrt.env.task import Task
from agentrt.rollout.dispatcher import Observer, Sink, first_of
from agentrt.rollout.group import group_record
from agentrt.rollout.play import EPISODE_FAILED
from agentrt.rollout.resume import GroupPlan, Member
from agentrt.rollout.run import left_to_run
from agentrt.rollout.sink import RunFolder

log = structlog.get_logger(__name__)


class WorkerLost(Exception):
    """A worker ended while it played."""


class Workers(Protocol):
    """Those that play."""

    async def play(self, plan: GroupPlan) -> list[EpisodeRecord]:
        """The records of a plan's members, by one of them. `WorkerLost` if that one ends before it is done."""


async def run_over(
    workers: Workers, environment: Environment, spec: RunSpec, folder: RunFolder, observer: Observer
) -> int:
    """As `agentrt.rollout.run.run`, but the episodes are played by `workers`."""
    plans = await left_to_run(environment, spec, folder, observer)
    await spread(workers, plans, spec, folder, observer, as_group=bool(Rubric(environment).group_rewards))
    return sum(len(plan.members) for plan in plans)


async def spread(
    workers: Workers, plans: Sequence[GroupPlan], spec: RunSpec, sink: Sink, observer: Observer, *, as_group: bool
) -> None:
    """Run what `plans` say. Cancellation ends it, and what was played then leaves no record.

    Raises what the sink raises, and bugs of the workers, as they are.
    """
    permits = anyio.Semaphore(max(1, spec.max_concurrent // spec.group_size) if as_group else spec.max_concurrent)
    try:
        async with anyio.create_task_group() as playing:
            for plan in plans:
                group = _Group(workers, plan, spec, sink, observer)
                for unit in _units(plan, as_group=as_group):
                    await permits.acquire()
                    playing.start_soon(group.run, unit, permits)
    except BaseExceptionGroup as error:
        raise first_of(error) from error


def _units(plan: GroupPlan, *, as_group: bool) -> Iterator[GroupPlan]:
    """What one worker is given at a time."""
    if as_group:
        yield plan
    else:
        yield from (plan._replace(members=[member]) for member in plan.members)


class _Group:
    """One group while it runs."""

    def __init__(self, workers: Workers, plan: GroupPlan, spec: RunSpec, sink: Sink, observer: Observer) -> None:
        self._workers, self._plan, self._spec, self._sink, self._observer = workers, plan, spec, sink, observer
        self._rewards, self._left = list(plan.rewards), len(plan.members)

    async def run(self, unit: GroupPlan, permits: anyio.Semaphore) -> None:
        """Have a unit played and recorded; the group's record after the last."""
        try:
            for member in unit.members:
                self._observer.episode_started(unit.task.id, member.member)
            for record in await self._played(unit):
                self._sink.write(record)
                self._rewards[record.member] = record.reward
                self._left -= 1
                self._observer.episode_ended(record)
            if self._left == 0:
                group = group_record(self._plan.task.id, self._rewards)
                self._sink.write_group(group)
                self._observer.group_ended(group)
        finally:
            permits.release()

    async def _played(self, unit: GroupPlan) -> list[EpisodeRecord]:
        lost: WorkerLost | None = None
        for _ in range(2):
            try:
                return await self._workers.play(unit)
            except WorkerLost as error:
                lost = error
                members = [member.member for member in unit.members]
                log.warning("worker_lost", task=unit.task.id, members=members, error=str(error))
        return [_lost(unit.task, member, self._spec.seed, str(lost)) for member in unit.members]


def _lost(task: Task, member: Member, seed: int, message: str) -> EpisodeRecord:
    return EpisodeRecord(
        task_id=task.id, member=member.member, attempt=member.attempt,
        seed=seeds.derive(seed, task.id, member.member, member.attempt), status="error",
        error=Failure(boundary="runtime", type=WorkerLost.__name__, message=f"two workers ended while playing it: {message}"),
        stop_reason=StopReason.ERROR, truncated=False, reward=None, reward_reason=EPISODE_FAILED,
    )  # fmt: skip
