"""`agentrt init`: the starter is an environment that works, and nothing is overwritten."""

import random
from pathlib import Path

import pytest

from agentrt.cli.init import STARTER, init
from agentrt.core.errors import RecordError, UsageError
from agentrt.env import registry
from agentrt.rollout.order import chosen_tasks
from agentrt.rollout.play import run_episode
from agentrt.testing import ScriptedEngine, said, stage


@pytest.mark.anyio
async def test_the_starter_runs_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine" / "shop.py"
    init(path)
    assert path.read_bytes() == STARTER.read_bytes()
    assert f"agentrt run {path}" in capsys.readouterr().out
    environment = registry.load(str(path))
    about = registry.describe(environment)
    assert (about.name, about.splits, list(about.rewards), about.metrics) == (
        "Shopping", ("train", "eval"), ["correct"], ("calls",),
    )  # fmt: skip
    for split in about.splits:
        (task,) = await chosen_tasks(environment, split, 1, random.getrandbits(32))
        for answer, reward in ((task.data["answer"], 1.0), ("0", 0.0)):
            engine = ScriptedEngine([said(f"Well.\nAnswer: {answer}")])
            record = await run_episode(stage(environment, engine), task)
            assert (record.status, record.reward, record.metrics["calls"]) == ("ok", reward, 0.0)


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text("precious")
    with pytest.raises(UsageError, match="exists; choose another name"):
        init(tmp_path / "there.py")
    assert (tmp_path / "there.py").read_text() == "precious"
    with pytest.raises(UsageError, match=r"ends in \.py"):
        init(tmp_path / "env")
    with pytest.raises(RecordError, match="cannot be written"):
        init(tmp_path / "there.py" / "env.py")
