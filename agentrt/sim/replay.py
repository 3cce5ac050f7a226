"""A recorded run as traffic: its prompts, turn lengths, tool times and results, played again without its model.

What is kept is when things would happen and whose KV would be where: ids that were sampled are replaced by others, as many.
Of an episode with several branches the main one is played. Tools take as long as they took, whatever the policy.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from agentrt.core import clock, seeds
from agentrt.core.errors import UsageError
from agentrt.core.records import MAIN, EpisodeRecord, good_records, read
from agentrt.core.spec import RunSpec
from agentrt.engine.kv.group import HOST_FACTOR
from agentrt.engine.sequence import Sequence as EngineSequence
from agentrt.engine.simulate import Say
from agentrt.env.chat.message import Message, ToolCall
from agentrt.env.chat.renderer import ToolDescription
from agentrt.env.environment import Agent, Environment
from agentrt.env.task import Task
from agentrt.env.tool import Tool
from agentrt.rollout.resume import GroupPlan, Member
from agentrt.rollout.sink import TRAJECTORIES, stored_run
from agentrt.sim.load import Played
from agentrt.sim.spec import SimSpec
from agentrt.sim.traffic import END_ID, FIRST_OWN_ID, VOCAB_SIZE, Renderer


class Step(NamedTuple):
    """A turn, and the calls after it."""

    observed: list[int]
    """The ids before it that no turn has sampled: the prompt, or what came of the calls."""
    sampled: int
    calls: list[ToolCall]


class Recording(NamedTuple):
    """A run."""

    spec: RunSpec
    episodes: dict[str, list[list[Step]]]
    """By task, in member order."""


def recording(folder: Path) -> Recording:
    """The good episodes of a run folder. `UsageError` if there are none."""
    spec = stored_run(folder).spec
    good = good_records(read(folder / TRAJECTORIES, EpisodeRecord))
    episodes: dict[str, list[list[Step]]] = {}
    for (task, _), record in sorted(good.items()):
        steps = steps_of(record)
        if steps:
            episodes.setdefault(task, []).append(steps)
    if not episodes:
        raise UsageError(f"{folder}: no finished episode to replay")
    return Recording(spec, episodes)


def steps_of(record: EpisodeRecord) -> list[Step]:
    """The main branch of an episode, turn by turn. What was called before the first of them is left out."""
    main = next((branch for branch in record.branches if branch.name == MAIN), None)
    if main is None or not main.turns:
        return []
    ends = [0, *(turn.end for turn in main.turns)]
    calls: list[list[ToolCall]] = [[] for _ in main.turns]
    for call in record.calls:
        if call.branch == MAIN and 0 <= call.turn < len(calls):
            calls[call.turn].append(ToolCall(call.name, {"seconds": call.seconds}))
    return [
        Step(main.token_ids[end : turn.start].tolist(), turn.end - turn.start, made)
        for (end, _), turn, made in zip(pairwise(ends), main.turns, calls, strict=True)
    ]


class Script(NamedTuple):
    """`engine.simulate.Script` of a recording."""

    lengths: dict[int, int]
    """Of each turn, by its seed."""

    def say(self, sequence: EngineSequence) -> Say:
        own = FIRST_OWN_ID + sequence.seed % (VOCAB_SIZE - FIRST_OWN_ID)
        return Say(own, min(self.lengths[sequence.seed], sequence.max_tokens), END_ID)


class ReplayRenderer(Renderer):
    """Gives what was observed then. A message says which: task, member, turn."""

    def __init__(self, recorded: Recording) -> None:
        super().__init__()
        self._episodes = recorded.episodes

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolDescription] = ()) -> list[int]:
        return self._episodes[messages[0].content][0][0].observed

    def join(self, messages: Sequence[Message], *, ended: bool, end_id: int | None = None) -> list[int]:
        member, turn, task = messages[-1].content.split(" ", 2)
        return self._episodes[task][int(member)][int(turn)].observed


class ReplayEnvironment(Environment):
    """The tasks of a recording, played turn by turn."""

    def __init__(self, recorded: Recording, note: Callable[[float], None]) -> None:
        self._episodes, self._note = recorded.episodes, note
        self._members: Counter[str] = Counter()

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        """Each once; its message is its id."""
        for name in self._episodes:
            yield Task(id=name, messages=(Message("user", name),))

    async def rollout(self, task: Task, agent: Agent) -> None:
        """One episode; members of a group start in order."""
        member = self._members[task.id]
        self._members[task.id] += 1
        messages: tuple[Message, ...] = ()
        for turn, step in enumerate(self._episodes[task.id][member]):
            asked = clock.now()
            await agent.sample(*messages)
            self._note(clock.now() - asked)
            if step.calls:
                await agent.call(*step.calls)
            messages = (Message("tool", f"{member} {turn + 1} {task.id}"),)


class ReplayLoad(NamedTuple):
    """`sim.cell.Load` of a recording."""

    recorded: Recording

    def mean_context(self) -> float:
        """Ids of the context at the end of a turn, over all turns."""
        return fmean(length for context in self._contexts() for length in context)

    def limits(self) -> tuple[int, int, float]:
        """See `sim.cell.Load`."""
        steps = [step for members in self.recorded.episodes.values() for one in members for step in one]
        slowest = max((call.arguments["seconds"] for step in steps for call in step.calls), default=0.0)
        longest = max(step.sampled for step in steps)
        return max(context[-1] for context in self._contexts()) + longest, longest, 2 * slowest + 1.0

    async def play(self, spec: SimSpec, note: Callable[[float], None]) -> Played:
        """See `sim.cell.Load`."""
        environment = self._environment()(self.recorded, note)
        plans = [
            GroupPlan(task, [Member(member, 0) for member in range(len(self.recorded.episodes[task.id]))], [])
            async for task in environment.tasks("train")
        ]
        plans = [plan._replace(rewards=[None] * len(plan.members)) for plan in plans]
        return Played(environment, ReplayRenderer(self.recorded), plans)

    def script(self, spec: SimSpec) -> Script:
        """The turn lengths, by the seeds that the episodes of a run with this seed give their turns."""
        lengths: dict[int, int] = {}
        for task, members in self.recorded.episodes.items():
            for member, steps in enumerate(members):
                branch = seeds.derive(seeds.derive(spec.seed, task, member, 0), "branch", MAIN)
                lengths |= {seeds.derive(branch, "turn", turn): step.sampled for turn, step in enumerate(steps)}
        return Script(lengths)

    def _environment(self) -> type[ReplayEnvironment]:
        """With the tools that were called."""
        names = sorted({call.name for members in self.recorded.episodes.values() for call in _calls(members)})

        class Recorded(ReplayEnvironment):
            tools = tuple(
                Tool(name=name, description="Takes as long as it took.", parameters={"type": "object"}, argv=(name,))
                for name in names
            )

        return Recorded

    def _contexts(self) -> Iterator[list[int]]:
        for members in self.recorded.episodes.values():
            for steps in members:
                yield list(accumulate(len(step.observed) + step.sampled for step in steps))


def replay_spec(recorded: Recording, pool: int = 0) -> SimSpec:
    """The recorded engine's pools and limits, on the simulated device; a pool of `pool` ids, if given.

    `UsageError` without it where the recorded engine took what its device had free: that number is not in a record.
    """
    engine = recorded.spec.engine
    if not pool and engine.kv_tokens == "auto" and engine.device != "cpu":
        raise UsageError("the recorded engine took what its device had free (engine.kv_tokens is auto): give --pool")
    tokens = pool or engine.pool_tokens
    host_share = float(HOST_FACTOR) if engine.host_tokens == "auto" else engine.host_tokens / tokens
    return SimSpec(
        pool_tokens=tokens, host_share=host_share, page_size=engine.page_size,
        step_tokens=engine.step_tokens, max_batch=engine.max_batch, live=recorded.spec.max_concurrent,
        ttl_seconds=engine.kv_ttl_seconds, policy=engine.kv_policy,
    )  # fmt: skip


def _calls(members: Iterable[list[Step]]) -> Iterator[ToolCall]:
    return (call for steps in members for step in steps for call in step.calls)
