"""The dispatcher: all episodes of a run, some at a time, each group to its end.

One task group owns all episodes and one semaphore counts them; an episode holds its permit until it is recorded, also
while a tool runs. A failed episode is a record like any other and its group goes on without it. Groups start in order,
all members of one before the next, so that they also end early. What cannot be recorded (a full disk) ends the run.
"""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Protocol

import anyio

from agentrt.core.records import EpisodeRecord, GroupRecord
from agentrt.rollout.group import Peers, group_record
from agentrt.rollout.play import Finished, play
from agentrt.rollout.resume import GroupPlan, Member
from agentrt.rollout.setup import Setup


class Sink(Protocol):
    """Where records go. What was written is safe when the call returns."""

    def write(self, record: EpisodeRecord) -> None: ...

    def write_group(self, group: GroupRecord) -> None: ...


class Observer(Protocol):
    """Told what happens, after it is recorded. Called on the event loop, so it must be quick."""

    def run_started(self, groups: int, episodes: int) -> None:
        """So many are left to run. Not called where groups come one by one."""

    def episode_started(self, task_id: str, member: int) -> None: ...

    def episode_ended(self, record: EpisodeRecord) -> None: ...

    def group_ended(self, group: GroupRecord) -> None: ...


class _Quiet:
    def run_started(self, groups: int, episodes: int) -> None: ...

    def episode_started(self, task_id: str, member: int) -> None: ...

    def episode_ended(self, record: EpisodeRecord) -> None: ...

    def group_ended(self, group: GroupRecord) -> None: ...


QUIET: Observer = _Quiet()
"""Shows nothing."""


async def dispatch(
    setup: Setup,
    plans: Iterable[GroupPlan] | AsyncGenerator[GroupPlan, None],
    sink: Sink,
    observer: Observer,
    *,
    max_concurrent: int,
) -> None:
    """Run what `plans` say; they may come one by one. Cancellation ends the episodes in flight, which leave no record.

    Raises what the sink raises, and bugs, as they are: not wrapped in a group.
    """
    permits = anyio.Semaphore(max_concurrent)
    try:
        coming = plans if isinstance(plans, AsyncGenerator) else _each(plans)
        async with anyio.create_task_group() as episodes, aclosing(coming):
            async for plan in coming:
                group = _Group(setup, plan, sink, observer)
                for member in plan.members:
                    await permits.acquire()
                    episodes.start_soon(_run, group, member, permits)
    except BaseExceptionGroup as error:
        raise first_of(error) from error


async def _run(group: "_Group", member: Member, permits: anyio.Semaphore) -> None:
    try:
        await group.run(member)
    finally:
        permits.release()


class _Group:
    """One group while it runs. With group rewards its members are recorded together, when the last one has ended."""

    def __init__(self, setup: Setup, plan: GroupPlan, sink: Sink, observer: Observer) -> None:
        self._setup, self._plan, self._sink, self._observer = setup, plan, sink, observer
        self._rewards = list(plan.rewards)
        self._peers = Peers(len(plan.members))
        self._held: list[Finished] = []

    async def run(self, member: Member) -> None:
        """Run one member, and close the group after the last."""
        self._observer.episode_started(self._plan.task.id, member.member)
        finished = await play(
            self._setup, self._plan.task, member=member.member, attempt=member.attempt, peers=self._peers
        )
        if self._setup.rubric.group_rewards:
            self._held.append(finished)
        else:
            self._record(finished)
        self._peers.left -= 1
        if self._peers.left == 0:
            await self._close()

    async def _close(self) -> None:
        held = sorted(self._held, key=lambda finished: finished.member)
        good = [finished for finished in held if finished.failure is None]
        if good:
            seconds = self._setup.limits.score_seconds
            episodes, scores = [one.episode for one in good], [one.scores for one in good]
            async with self._setup.scoring:
                await self._setup.rubric.score_group(episodes, scores, seconds)
        for finished in held:
            self._record(finished)
        group = group_record(self._plan.task.id, self._rewards)
        self._sink.write_group(group)
        self._observer.group_ended(group)

    def _record(self, finished: Finished) -> None:
        record = finished.record()
        self._sink.write(record)
        self._rewards[record.member] = record.reward
        self._observer.episode_ended(record)


async def _each(plans: Iterable[GroupPlan]) -> AsyncGenerator[GroupPlan, None]:
    for plan in plans:
        yield plan


def first_of(error: BaseException) -> BaseException:
    """The first error in a group of them; cancellation is what the others did because of it."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_of(one) for one in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, Exception)), leaves[0])
