"""`Runtime`: an engine, and the rollouts that feed a trainer while its policy changes.

    async with Runtime(setup) as runtime:
        async for group in runtime.rollouts(environment.tasks("train"), group_size=8, batch=8, max_staleness=1):
            ...                                             # when there are 8: train on their rows
            await runtime.update_weights(version, model.state_dict())

The runtime owns the engine and every episode: leaving it ends them. Groups are handed over as they end. Those whose
rewards are all equal are passed over and others started in their place, unless the trainer wants them. A member that is
too old when its group is handed over has no row; its reward still counts.
"""

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from contextlib import AsyncExitStack, aclosing
from types import TracebackType
from typing import Self

import anyio

from agentrt.core.errors import is_failure
from agentrt.core.protocol import UpdateMode, UpdateReport, WeightSource
from agentrt.core.records import EpisodeRecord, GroupRecord
from agentrt.env.task import Task
from agentrt.rollout.account import Account, Fate
from agentrt.rollout.dispatcher import QUIET, dispatch, first_of
from agentrt.rollout.group import Group
from agentrt.rollout.pace import Pace
from agentrt.rollout.resume import GroupPlan, Ledger
from agentrt.rollout.setup import Setup
from agentrt.rollout.sink import Held, RunFolder


class Runtime:
    """An async context manager: it enters and leaves the engine of `setup`.

    Records go to `folder`, if there is one; it is open. A task that has records there gets a new attempt.
    """

    def __init__(self, setup: Setup, folder: RunFolder | None = None, *, max_concurrent: int = 64) -> None:
        self.setup, self.folder, self.max_concurrent = setup, folder, max_concurrent
        self.ledger = Ledger(folder.trajectories() if folder else ())
        self._rollouts: list[Rollouts] = []

    @property
    def version(self) -> int:
        """The policy that samples now."""
        return self.setup.engine.statistics().version

    def rollouts(
        self, tasks: AsyncIterable[Task], *, group_size: int, batch: int, max_staleness: int = 0, extra: int = 0,
        keep_equal: bool = False,
    ) -> "Rollouts":  # fmt: skip
        """Start to roll out `tasks` in their order; ended groups are to be had from the result with `async for`.

        The trainer takes `batch` groups, then updates the weights. No token it gets is of a policy more than
        `max_staleness` versions back; so many groups are under way that few are in vain. `extra` ones more are, so that
        the slowest need not be waited for. `keep_equal` hands over also groups whose rewards are all equal, for a trainer
        with a baseline of its own. The iteration ends with `tasks`, or with this runtime.
        """
        rollouts = Rollouts(self, tasks, group_size, Pace(batch, max_staleness, extra), keep_equal)
        self._rollouts.append(rollouts)
        self._episodes.start_soon(rollouts.run)
        return rollouts

    async def evaluate(self, tasks: Iterable[Task]) -> list[EpisodeRecord]:
        """Roll out an episode of each of `tasks` apart from training: nothing of it is in `folder` or counted anywhere.

        The same tasks have the same noise each time, so two versions are compared under equal luck.
        """
        plans, held = [Ledger().again(task, 1) for task in tasks], Held()
        await dispatch(self.setup, plans, held, QUIET, max_concurrent=self.max_concurrent)
        return sorted(held.episodes, key=lambda episode: episode.key)

    async def update_weights(self, version: int, source: WeightSource, mode: UpdateMode = "recompute") -> UpdateReport:
        """See `agentrt.core.protocol.Engine.update_weights`. Rollouts that waited for a new version go on."""
        report = await self.setup.engine.update_weights(version, source, mode)
        for rollouts in self._rollouts:
            rollouts.version_changed()
        return report

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.setup.engine)
            stack.callback(self._close)
            self._episodes = await stack.enter_async_context(anyio.create_task_group())
            self._opened = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._episodes.cancel_scope.cancel()
        try:
            await self._opened.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            first = first_of(group)
            if error is None or first is not first_of(error):  # else it is the caller's own, and passes as it is
                raise first from group

    def _close(self) -> None:
        for rollouts in self._rollouts:
            rollouts.close()


class Rollouts:
    """An async iterator of `Group`, and the sink of the episodes behind it. `Runtime.rollouts` makes it."""

    def __init__(
        self, runtime: Runtime, tasks: AsyncIterable[Task], group_size: int, pace: Pace, keep_equal: bool
    ) -> None:
        self._runtime, self._tasks, self._group_size, self._pace = runtime, tasks, group_size, pace
        self._keep_equal = keep_equal
        self._ledger = runtime.ledger
        self.account = Account()
        self._running: dict[tuple[str, int], list[EpisodeRecord]] = defaultdict(list)
        """Records of the groups under way, by task and attempt."""
        self._wake = anyio.Event()
        self._send, self._ended = anyio.create_memory_object_stream[Group](float("inf"))

    def __repr__(self) -> str:
        return f"<Rollouts {self._pace!r}, {self.account!r}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Group:
        """The next group that has a row to learn from."""
        pace = self._pace
        while True:
            pace.begin_batch()
            self._wake.set()
            try:
                group = await self._ended.receive()
            except (anyio.EndOfStream, anyio.ClosedResourceError):
                raise StopAsyncIteration from None
            group = group.older_than(self._runtime.version - pace.max_staleness)
            if any(row.advantage or self._keep_equal for row in group.rows()):
                pace.take()
                self.account.move(group, Fate.TAKEN)
                return group
            pace.drop()
            self.account.move(group, Fate.STALE)

    async def run(self) -> None:
        """Roll out to the end of the tasks. `Runtime` runs it."""
        runtime = self._runtime
        with self._send:
            await dispatch(runtime.setup, self._plans(), self, QUIET, max_concurrent=runtime.max_concurrent)

    def close(self) -> None:
        """Hand over no more. `Runtime` does it at its end, also of rollouts that had no time to begin."""
        self._send.close()
        self._ended.close()

    def version_changed(self) -> None:
        """There is a new version, so a further batch may start."""
        self._pace.begin_batch()
        self._wake.set()

    def write(self, record: EpisodeRecord) -> None:
        """Keep a record until its group ends. `RecordError` if the folder cannot be written."""
        if self._runtime.folder is not None:
            self._runtime.folder.write(record)
        self._running[record.task_id, record.attempt].append(record)

    def write_group(self, record: GroupRecord) -> None:
        """Offer a group to the trainer, or drop it and let another one start."""
        if self._runtime.folder is not None:
            self._runtime.folder.write_group(record)
        key = next(
            key for key, held in self._running.items() if key[0] == record.task_id and len(held) == record.members
        )
        group = Group(record, sorted(self._running.pop(key), key=lambda episode: episode.member))
        if group.has_signal or (self._keep_equal and record.valid):
            self.account.add(group, Fate.UNUSED)
            self._send.send_nowait(group)
            return
        self.account.add(group, Fate.FILTERED if record.valid else Fate.FAILED)
        self._pace.drop()
        self._wake.set()

    async def _plans(self) -> AsyncGenerator[GroupPlan, None]:
        async with AsyncExitStack() as stack:
            if isinstance(self._tasks, AsyncGenerator):
                await stack.enter_async_context(aclosing(self._tasks))
            try:
                async for task in self._tasks:
                    while not self._pace.may_start:
                        self._wake = anyio.Event()
                        await self._wake.wait()
                    self._pace.start()
                    yield self._ledger.again(task, self._group_size)
            except anyio.get_cancelled_exc_class() as error:
                if is_failure(error):  # the tasks awaited what they had cancelled: it must not pass for their end
                    raise RuntimeError("the tasks raised a CancelledError that nobody asked for") from error
                raise
