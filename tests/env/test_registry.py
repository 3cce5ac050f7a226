"""Environments by name, module path and file, of every kind that is accepted."""

from pathlib import Path

import pytest

from agentrt import Environment, Message, Task
from agentrt.core.errors import UsageError
from agentrt.env import registry
from agentrt.rollout.play import run_episode
from agentrt.testing import ScriptedEngine, said, stage

pytestmark = pytest.mark.anyio
TASK = Task("t", (Message("user", "q"),))

FUNCTIONS = '''
"""Says hello."""
from agentrt import Message, Task, metric, reward

splits = ("only",)

async def tasks(split):
    yield Task("a", (Message("user", "hello?"),))

async def rollout(task, agent):
    turn = await agent.sample()
    agent.episode.state["said"] = turn.content

@reward(weight=2.0)
async def polite(episode):
    return float(episode.state["said"] == "hello")

@metric
async def length(episode):
    return len(episode.answer)
'''
DUCK = '''
from agentrt import Task, reward

class Duck:
    """Quacks."""
    def __init__(self, loud=False):
        self.loud = loud
    async def tasks(self, split):
        yield Task("a", ())
    async def rollout(self, task, agent):
        await agent.sample()
    @reward
    async def right(self, episode):
        return 1.0
'''


def written(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return str(path)


async def test_a_file_of_functions_is_an_environment(tmp_path: Path) -> None:
    environment = registry.load(written(tmp_path, FUNCTIONS))
    assert isinstance(environment, Environment)
    about = registry.describe(environment)
    assert (about.doc, about.splits) == ("Says hello.", ("only",))
    assert (about.rewards, about.metrics) == ({"polite": 2.0}, ("length",))
    assert [task.id async for task in environment.tasks("only")] == ["a"]
    record = await run_episode(stage(environment, ScriptedEngine([said("hello")])), TASK)
    assert (record.reward, record.metrics["length"]) == (2.0, 5.0)


async def test_a_class_with_a_rollout_is_an_environment(tmp_path: Path) -> None:
    environment = registry.load(written(tmp_path, DUCK), loud=True)
    assert isinstance(environment, Environment)
    assert registry.describe(environment).name == "Duck"
    assert environment.loud is True  # type: ignore[attr-defined]
    assert (await run_episode(stage(environment, ScriptedEngine([said("x")])), TASK)).reward == 1.0


def test_an_installed_one_by_name_and_by_module() -> None:
    for name in ("calculator", "agentrt_envs.calculator", "agentrt_envs.calculator:Calculator"):
        assert registry.describe(registry.load(name)).name == "Calculator"
    assert "calculator" in registry.names()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("calculater", "unknown environment 'calculater'; did you mean 'calculator'"),
        ("no.such.module", "unknown environment 'no.such.module'"),
        ("", "unknown environment ''"),
        ("..x", "unknown environment"),
        ("none.py", "no such file"),
        ("agentrt_envs.calculator:Calc", "did you mean 'Calculator'"),
        ("json", "no environment in it"),
    ],
)
def test_names_that_lead_nowhere(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        registry.load(name)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(UsageError, match="'levl'"):
        registry.load("calculator", levl=3)


def test_a_module_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tasks"):
        registry.load(written(tmp_path, "async def rollout(task, agent): ..."))


def test_a_module_with_two_environments(tmp_path: Path) -> None:
    name = written(tmp_path, DUCK + "\nclass Goose(Duck):\n    pass\n")
    with pytest.raises(UsageError, match=f"choose one: {name}:Duck"):
        registry.load(name)
    assert registry.describe(registry.load(f"{name}:Goose")).name == "Goose"


def test_an_import_that_fails_inside_is_its_authors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_env.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        registry.load("broken_env")
