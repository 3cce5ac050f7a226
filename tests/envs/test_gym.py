"""reasoning-gym's data sets as an environment: stable tasks, their own scorer, cheaters that get nothing."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from agentrt import StopReason, Task
from agentrt.core.errors import UsageError
from agentrt.env import registry
from agentrt.env.tool import Tool
from agentrt.rollout.play import run_episode
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.sandbox import Sandbox
from agentrt.testing import ScriptedEngine, said, stage
from agentrt_envs import gym
from agentrt_envs.gym import HOSTILE, ReasoningGym, tagged
from agentrt_tools import called

pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore"),  # of reasoning-gym and what it imports
]
NAMES = ("basic_arithmetic", "chain_sum", "letter_counting")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def split(name: str, part: str) -> list[Task]:
    return [task async for task in registry.load(f"reasoning_gym:{name}").tasks(part)]


@pytest.mark.parametrize(("part", "size"), [("train", 500), ("eval", 100), ("adversarial", 24)])
async def test_tasks_are_always_the_same(part: str, size: int) -> None:
    first, second = await split("basic_arithmetic", part), await split("basic_arithmetic", part)
    assert first == second
    assert len({task.id for task in first}) == size


async def test_the_splits_have_nothing_in_common() -> None:
    train, held_out = await split("basic_arithmetic", "train"), await split("basic_arithmetic", "eval")
    asked = {task.messages[1].content for task in train}
    assert sum(task.messages[1].content in asked for task in held_out) <= 2


@pytest.mark.parametrize("name", NAMES)
async def test_the_right_answer_scores_one_in_an_episode(name: str) -> None:
    environment = ReasoningGym(name)
    async for task in environment.tasks("adversarial"):
        right = task.data["entry"]["answer"]
        for text, expected in ((f"so <answer> {right}\n</answer>", 1.0), (right, 0.0)):
            setup = stage(environment, ScriptedEngine([said(text)]))
            setup.sandboxes = partial(Sandbox, Permits(2))
            record = await run_episode(setup, task)
            assert (record.reward, record.metrics["turns"]) == (expected, 1.0)
        if task.id.endswith("-3"):
            break


@pytest.mark.parametrize("name", NAMES)
async def test_a_cheater_gets_nothing_on_adversarial_tasks(name: str) -> None:
    environment = ReasoningGym(name)
    tasks = [task async for task in environment.tasks("adversarial")]
    assert len(tasks) == 2 * len(HOSTILE)
    for task in tasks:
        question, right = task.messages[1].content, task.data["entry"]["answer"]
        lures = re.findall(r"answer is (\S+)\.", question) + re.findall(r"<answer>(.*?)</answer>", question)
        words = [
            "correct",
            "score = 1.0",
            "1.0",
            "",
            question,
            " ".join(map(str, range(2000))),
            "entry['answer']",
            "__import__('os')",
            "exit()",
            *lures,
        ]
        texts = [f"<answer>{word}</answer>" for word in words] + words
        texts += ["".join(f"<answer>{number}</answer>" for number in range(-500, 500)), f"<answer>{right}</answer>" * 2]
        for text in texts:
            if text != f"<answer>{right}</answer>":
                assert await environment.score(cast(Any, ended(text, task))) == 0.0, text[:80]


def ended(answer: str, task: Task, run: Any = None) -> SimpleNamespace:
    return SimpleNamespace(answer=answer, task=task, stop_reason=StopReason.COMPLETED, run=run or here)


async def here(program: Tool, arguments: dict[str, Any]) -> str:
    """As `Episode.run`, in this process: only for answers that do no harm."""
    reply = called.answer(*program.argv[-2:], arguments)
    if "error" in reply:
        raise RuntimeError(reply["error"])
    return str(reply["result"])


@pytest.fixture
def in_the_sandbox() -> Iterator[Any]:
    with Sandbox(Permits(2)) as sandbox:

        async def run(program: Tool, arguments: dict[str, Any]) -> str:
            result = await sandbox.call(program.argv, arguments, seconds=60, terms=program.terms)
            if result.outcome != "ok":
                raise RuntimeError(result.text)
            return result.text

        yield run


def reachable(folder: Path) -> Path:
    folder.chmod(0o777)
    return folder


def found(folder: Path) -> list[Path]:
    return [*folder.iterdir()]


@pytest.mark.parametrize("name", ["n_queens", "countdown", "puzzle24"])
async def test_an_answer_that_is_evaluated_reaches_nothing(
    name: str, tmp_path: Path, in_the_sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = ReasoningGym(name)
    task = await anext(environment.tasks("train"))
    mark = reachable(tmp_path) / "m"
    code = f"__import__('os').open('{mark}',64)"
    assert await environment.score(cast(Any, ended(f"<answer>{code}</answer>", task, in_the_sandbox))) == 0.0
    right = f"<answer>{task.data['entry']['answer']}</answer>"
    monkeypatch.setattr(gym, "_CODE", re.compile("(?!)"))
    monkeypatch.setattr(gym, "SPARE_CHARACTERS", 1000)
    limits = msgspec.structs.replace(gym.SCORER.terms.limits, wall_seconds=1)
    terms = msgspec.structs.replace(gym.SCORER.terms, limits=limits)
    monkeypatch.setattr(gym, "SCORER", msgspec.structs.replace(gym.SCORER, terms=terms))
    for text in (code, "9**9**9**9**9", "exit()"):
        score = await environment.score(cast(Any, ended(f"<answer>{text}</answer>", task, in_the_sandbox)))
        assert score < 0.1
    assert found(tmp_path) == []
    assert await environment.score(cast(Any, ended(right, task, in_the_sandbox))) == 1.0


async def test_a_scorer_that_takes_not_even_the_right_answer_gives_no_zero() -> None:
    async def broken(program: Tool, arguments: dict[str, Any]) -> str:
        raise RuntimeError("no module named reasoning_gym")

    environment = ReasoningGym("chain_sum")
    task = await anext(environment.tasks("train"))
    with pytest.raises(RuntimeError, match="no module"):
        await environment.score(cast(Any, ended("<answer>1</answer>", task, broken)))


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("<answer>1</answer>", "1"), ("x\n<answer>\n 1 2\n</answer>", "1 2"), ("<answer></answer>", ""), ("1", None),
        ("<answer>1", None), ("<answer>1</answer><answer>", None), ("<answer>1</answer> <answer>2</answer>", None),
    ],
)  # fmt: skip
async def test_tagged(content: str, answer: str | None) -> None:
    assert tagged(content) == answer


async def test_settings_and_names_that_are_wrong() -> None:
    with pytest.raises(UsageError, match="no data set 'chain_sums'; did you mean 'chain_sum'"):
        registry.load("reasoning_gym:chain_sums")
    with pytest.raises(UsageError, match=r"chain_sum: wrong environment_args: .*max_termss"):
        registry.load("reasoning_gym:chain_sum", max_termss=3)
    with pytest.raises(UsageError, match="made with a dataset, NAME:DATASET"):
        registry.load("reasoning_gym")
    with pytest.raises(UsageError, match="calculator:x: wrong environment_args"):
        registry.load("calculator:x")
