"""Whole episodes in a test: an environment, scripted turns, fake tools, and a sink that keeps what is written."""

from typing import Any

from agentrt.core.records import EpisodeRecord, GroupRecord
from agentrt.core.spec import Limits, RunSpec, SamplingParams
from agentrt.env.chat.chatml import END, ChatML
from agentrt.env.environment import Environment
from agentrt.rollout.setup import Setup
from agentrt.testing.engine import ScriptedEngine
from agentrt.testing.tokenizer import byte_tokenizer
from agentrt.testing.tools import FakeSandbox

_TOKENIZER = byte_tokenizer()


def said(text: str, *, ended: bool = True) -> list[int]:
    """The ids of a scripted turn that says `text`, with the end of turn, or without (it is cut, or goes on)."""
    return [*text.encode(), _TOKENIZER.special[END]] if ended else list(text.encode())


def called(name: str, arguments: str = "{}") -> str:
    """The text of a tool call; `arguments` is JSON text."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def stage(
    environment: Environment,
    engine: ScriptedEngine,
    *,
    sandbox: FakeSandbox | None = None,
    limits: Limits = Limits(),
    sampling: SamplingParams = SamplingParams(),
    seed: int = 0,
) -> Setup:
    """The set-up of a run over a scripted engine and the byte tokenizer; without `sandbox` no tool can run."""
    spec = RunSpec(environment="staged", limits=limits, sampling=sampling, seed=seed)
    fake = sandbox or FakeSandbox({})
    return Setup(environment=environment, engine=engine, renderer=ChatML(_TOKENIZER), spec=spec, sandboxes=lambda: fake)


class MemorySink:
    """Keeps what a run writes, and what an observer is told."""

    def __init__(self) -> None:
        self.records: list[EpisodeRecord] = []
        self.groups: list[GroupRecord] = []
        self.events: list[tuple[Any, ...]] = []
        """`("run", groups, episodes)`, `("started", task, member)`, `("ended", task, member)`, `("group", task)`, in order."""

    def write(self, record: EpisodeRecord) -> None:
        self.records.append(record)

    def write_group(self, group: GroupRecord) -> None:
        self.groups.append(group)

    def run_started(self, groups: int, episodes: int) -> None:
        self.events.append(("run", groups, episodes))

    def episode_started(self, task_id: str, member: int) -> None:
        self.events.append(("started", task_id, member))

    def episode_ended(self, record: EpisodeRecord) -> None:
        self.events.append(("ended", *record.key))

    def group_ended(self, group: GroupRecord) -> None:
        self.events.append(("group", group.task_id))
