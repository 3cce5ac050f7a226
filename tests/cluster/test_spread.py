"""A run spread over workers that are functions: what is recorded when they end in the middle."""

import anyio
import pytest

from agentrt.cluster.spread import WorkerLost, spread
from agentrt.core.records import EpisodeRecord, StopReason
from agentrt.core.spec import RunSpec
from agentrt.env.task import Task
from agentrt.rollout.resume import GroupPlan, Member
from agentrt.testing import MemorySink

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(virtual_time: object) -> object:
    return virtual_time


class Fakes:
    """Workers whose episodes take a second. Those of a task in `poison` end their worker, so many times."""

    def __init__(self, poison: dict[str, int] | None = None) -> None:
        self.poison = dict(poison or {})
        self.given: list[tuple[str, tuple[int, ...]]] = []
        self.running = self.most = 0

    async def play(self, plan: GroupPlan) -> list[EpisodeRecord]:
        self.given.append((plan.task.id, tuple(member.member for member in plan.members)))
        self.running += len(plan.members)
        self.most = max(self.most, self.running)
        try:
            await anyio.sleep(1)
        finally:
            self.running -= len(plan.members)
        if self.poison.get(plan.task.id):
            self.poison[plan.task.id] -= 1
            raise WorkerLost("the actor died")
        return [
            EpisodeRecord(
                task_id=plan.task.id, member=one.member, attempt=one.attempt, seed=1, status="ok",
                stop_reason=StopReason.COMPLETED, truncated=False, reward=float(one.member),
            )
            for one in plan.members
        ]  # fmt: skip


def plans(*names: str) -> list[GroupPlan]:
    return [GroupPlan(Task(name, ()), [Member(0, 0), Member(1, 3)], [None, None]) for name in names]


async def spread_over(fakes: Fakes, *names: str, as_group: bool = False, concurrent: int = 4) -> MemorySink:
    sink, spec = MemorySink(), RunSpec(environment="x", group_size=2, max_concurrent=concurrent)
    await spread(fakes, plans(*names), spec, sink, sink, as_group=as_group)
    return sink


async def test_episodes_go_one_by_one_and_groups_are_recorded_after_their_last() -> None:
    fakes = Fakes()
    sink = await spread_over(fakes, "a", "b", "c")
    assert sorted(record.key for record in sink.records) == [(name, n) for name in "abc" for n in (0, 1)]
    assert sorted((one.task_id, one.rewards, one.advantages) for one in sink.groups) == [
        (name, [0.0, 1.0], [-1.0, 1.0]) for name in "abc"
    ]
    assert sorted(fakes.given) == [(name, (n,)) for name in "abc" for n in (0, 1)]
    assert fakes.most == 4
    assert sink.events.index(("group", "a")) > sink.events.index(("ended", "a", 1))


async def test_what_a_lost_worker_played_is_played_again_once() -> None:
    fakes = Fakes({"b": 1})
    sink = await spread_over(fakes, "a", "b")
    assert [record.status for record in sink.records] == ["ok"] * 4
    assert len({(record.key, record.attempt) for record in sink.records}) == 4
    assert sorted(name for name, _ in fakes.given) == ["a", "a", "b", "b", "b"]
    assert len(sink.groups) == 2


async def test_an_episode_that_ends_two_workers_has_failed() -> None:
    sink = await spread_over(Fakes({"a": 4}), "a", "b")
    lost = [record for record in sink.records if record.task_id == "a"]
    assert sorted((one.status, one.reward, one.reward_reason, one.attempt) for one in lost) == [
        ("error", None, "episode_failed", 0),
        ("error", None, "episode_failed", 3),
    ]
    assert lost[0].error is not None
    assert lost[0].error.message == "two workers ended while playing it: the actor died"
    assert sorted((group.task_id, group.valid) for group in sink.groups) == [("a", 0), ("b", 2)]


async def test_with_group_rewards_a_group_stays_together() -> None:
    fakes = Fakes({"a": 1})
    sink = await spread_over(fakes, "a", "b", "c", as_group=True)
    assert sorted(fakes.given) == [("a", (0, 1)), ("a", (0, 1)), ("b", (0, 1)), ("c", (0, 1))]
    assert (fakes.most, len(sink.records)) == (4, 6)


async def test_a_sink_that_fails_ends_the_run() -> None:
    class Full(MemorySink):
        def write(self, record: EpisodeRecord) -> None:
            raise OSError("no space left on device")

    fakes, sink, spec = Fakes(), Full(), RunSpec(environment="x", max_concurrent=2)
    with pytest.raises(OSError, match="no space left"):
        await spread(fakes, plans("a", "b"), spec, sink, sink, as_group=False)
    assert fakes.running == 0
