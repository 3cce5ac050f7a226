"""The environments that docs/environments.md and README.md show are ones that run."""

import re
from pathlib import Path

import anyio
import pytest

from agentrt.core.records import EpisodeRecord
from agentrt.env import registry
from agentrt.env.environment import Environment
from agentrt.rollout.order import chosen_tasks
from agentrt.rollout.play import run_episode
from agentrt.testing import ScriptedEngine, said, stage

ROOT = Path(__file__).parents[2]


def shown(page: str, file: str, folder: Path) -> Environment:
    """The environment in the code block that begins with `# file`."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(f"# {file}\n")]
    (folder / file).write_text(block, encoding="utf-8")
    return registry.load(str(folder / file))


def played(environment: Environment, *turns: str) -> EpisodeRecord:
    async def main() -> EpisodeRecord:
        (task,) = await chosen_tasks(environment, "train", 1, 0)
        said_of = [said(turn.format(**task.data)) for turn in turns]
        return await run_episode(stage(environment, ScriptedEngine(said_of)), task)

    return anyio.run(main)


@pytest.mark.parametrize(("answer", "reward"), [("{ship}", 1.0), ("Dora", 0.0)])
def test_the_class_form(answer: str, reward: float, tmp_path: Path) -> None:
    record = played(shown("docs/environments.md", "harbour.py", tmp_path), answer)
    assert (record.status, record.reward, record.metrics["searches"]) == ("ok", reward, 0.0)


def test_the_function_form(tmp_path: Path) -> None:
    environment = shown("docs/environments.md", "countdown.py", tmp_path)
    record = played(environment, "{n}", "wrong")
    assert (record.status, record.reward, record.metrics["turns"]) == ("ok", 0.0, 2.0)
    record = played(environment, *map(str, range(30, 0, -1)))
    assert record.status == "ok"


def test_the_readmes_environment(tmp_path: Path) -> None:
    assert played(shown("README.md", "guess.py", tmp_path), "It is {answer}").reward == 1.0
