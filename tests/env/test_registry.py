"""Environments by name, module path and file, of every kind that is accepted."""

import hashlib
import queue
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from agentrt import Environment, Message, Task
from agentrt.core.errors import EnvironmentFailure, UsageError
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


def test_a_module_is_free_in_its_other_names(tmp_path: Path) -> None:
    """`programs` and `require` are names of `Environment` too."""
    name = written(tmp_path, FUNCTIONS + "\nprograms = ['print(1)']\ndef require(value):\n    return value\n")
    assert registry.load(name).programs == ()


def test_a_file_takes_nobodys_name(tmp_path: Path) -> None:
    """The version in run.toml was that of the standard library's file, and who imported `queue` later got the environment."""
    for folder, doc in (("a", "First."), ("b.c", "Second.")):
        (tmp_path / folder).mkdir()
        text = DUCK.replace("Quacks.", doc)
        (tmp_path / folder / "queue.py").write_text(text)
        about = registry.describe(registry.load(str(tmp_path / folder / "queue.py")))
        assert (about.name, about.doc, about.source_hash) == ("Duck", doc, hashlib.sha256(text.encode()).hexdigest())
    assert hasattr(queue, "SimpleQueue")
    (tmp_path / "sched.py").write_text(FUNCTIONS)
    assert registry.describe(registry.load(str(tmp_path / "sched.py"))).name == "sched"
    assert hasattr(import_module("sched"), "scheduler")


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


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise ValueError('no data')", "ValueError: no data"),
    ],
)
def test_what_fails_inside_a_module_is_its_authors(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_env.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("broken_env", str(tmp_path / "broken_env.py")):
        monkeypatch.delitem(sys.modules, "broken_env", raising=False)
        with pytest.raises(EnvironmentFailure, match=re.escape(f"environment {name} raised {why}")) as failed:
            registry.load(name)
        assert type(failed.value.__cause__).__name__ == why.partition(":")[0]


def test_what_fails_when_an_environment_is_made_is_its_authors(tmp_path: Path) -> None:
    name = written(tmp_path, "from agentrt import Environment\nclass X(Environment):\n    def __init__(self): 1 / 0\n")
    with pytest.raises(EnvironmentFailure, match=re.escape(f"environment {name}: X raised ZeroDivisionError")):
        registry.load(name)


def test_a_tool_that_is_only_named_is_none(tmp_path: Path) -> None:
    name = written(tmp_path, DUCK.replace('"""Quacks."""', 'tools = ["calculator"]'))
    with pytest.raises(UsageError, match=r"'calculator' in tools is no Tool; write tool\(\.\.\.\) around a name"):
        registry.load(name)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tools = (tool('calculator'))", "X.tools is one Tool, not several; write `tools = (...,)`"),
        ("tools = 'calculator'", "X.tools is one str, not several"),
        ("splits = ('train')", "X.splits is one str, not several; write `splits = (...,)`"),
        ("tools = (tool('calculator'), tool('calculator'))", "X has two tools with the name 'calculator'; rename one"),
    ],
)
def test_tools_and_splits_that_cannot_be(tmp_path: Path, line: str, words: str) -> None:
    """Before a model is loaded; a tuple of one without its comma was a traceback, or the splits t, r, a, i, n."""
    name = written(tmp_path, f"from agentrt import Environment, tool\nclass X(Environment):\n    {line}\n")
    with pytest.raises(UsageError, match=re.escape(words)):
        registry.load(name)


def test_a_module_that_names_its_own_mistake_passes(tmp_path: Path) -> None:
    name = written(tmp_path, "from agentrt import tool\ntool('calculater')\n")
    with pytest.raises(UsageError, match="unknown tool 'calculater'; did you mean 'calculator'"):
        registry.load(name)
