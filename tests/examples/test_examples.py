"""The examples do what they say."""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrt.core.records import BranchRecord, EpisodeRecord, StopReason
from agentrt.core.spec import RunSpec
from agentrt.core.tokens import Floats, Ids, Mask
from agentrt.env import registry
from agentrt.env.environment import Environment
from agentrt.rollout.dispatcher import dispatch
from agentrt.rollout.group import Group, group_record
from agentrt.rollout.order import chosen_tasks
from agentrt.rollout.resume import Ledger
from agentrt.rollout.run import run
from agentrt.rollout.setup import Setup
from agentrt.rollout.sink import RunFolder
from agentrt.sandbox.level import Level
from agentrt.sandbox.probe import shared
from agentrt.testing import MemorySink, ScriptedEngine, called, said, stage

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = [path for path in EXAMPLES.glob("*.py") if path.name not in ("train_sprout.py", "grpo.py")]


def played(environment: Environment, engine: ScriptedEngine, *, members: int) -> list[EpisodeRecord]:
    """Records of one group over a scripted engine, with real tools."""

    async def main() -> list[EpisodeRecord]:
        staged, sink = stage(environment, engine), MemorySink()
        setup = Setup(
            environment=environment, engine=engine, renderer=staged.renderer, spec=RunSpec(environment="example")
        )
        tasks = await chosen_tasks(environment, "train", 1, 0)
        as_group = bool(setup.rubric.group_rewards)
        await dispatch(setup, Ledger().left(tasks, members, as_group=as_group), sink, sink, max_concurrent=4)
        return sorted(sink.records, key=lambda record: record.member)

    return anyio.run(main)


def test_they_are_short() -> None:
    assert len(SHORT) == 6
    assert {
        path.name: len(path.read_text().splitlines()) for path in SHORT if len(path.read_text().splitlines()) >= 60
    } == {}


def test_own_tool_keeps_its_state_in_the_episodes_folder() -> None:
    environment = registry.load(str(EXAMPLES / "own_tool.py"))
    turns = [called("dice", '{"op": "sum"}'), called("dice", '{"op": "roll"}'), called("dice", '{"op": "sum"}'), "?"]
    (record,) = played(environment, ScriptedEngine([said(turn) for turn in turns]), members=1)
    assert [call.outcome for call in record.calls] == ["tool_error", "ok", "ok"]
    _, roll, total = record.calls
    assert sum(map(int, roll.result.split())) == int(total.result)
    assert {name: part.score for name, part in record.rewards.items()} == {"right": 0.0, "rolled": 1.0}


def test_a_black_box_reaches_its_endpoint_with_openais_client() -> None:
    pytest.importorskip("openai")
    if shared().isolation.level is not Level.L3:
        pytest.skip("a program reaches its endpoint at L3 only")
    environment = registry.load(str(EXAMPLES / "black_box.py"))
    turns = [called("calculator", '{"expression": "2 + 3"}'), "Answer: 5"]
    records = played(environment, ScriptedEngine([said(turn) for turn in turns]), members=2)
    assert [(record.status, record.error) for record in records] == [("ok", None)] * 2
    for record in records:
        assert [(one["role"], one["content"]) for one in record.messages[2:]] == [
            ("assistant", ""),
            ("tool", "5"),
            ("assistant", "Answer: 5"),
        ]
        [branch] = record.branches
        assert [branch.token_ids[turn.start : turn.end].tolist() for turn in branch.turns] == [
            said(turn) for turn in turns
        ]
        assert record.rewards["correct"].score in (0.0, 1.0)


def test_two_agents_are_two_branches_scored_as_a_group() -> None:
    environment = registry.load(str(EXAMPLES / "two_agents.py"))
    script = [said("one two three"), said("The sea is wide.")]
    records = played(environment, ScriptedEngine(script), members=2)
    for record in records:
        assert [(branch.name, len(branch.turns)) for branch in record.branches] == [("main", 2), ("critic", 1)]
        assert {name: part.score for name, part in record.rewards.items()} == {"short": 1.0, "typical": 1.0}
        assert record.reward == 1.5


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of sprout."""
    from agentrt.core.models import find_model
    from agentrt.core.tokenizer import Tokenizer
    from agentrt.engine.local import local_engine
    from agentrt.env.chat.choose import renderer_for

    folder = tmp_path_factory.mktemp("demo") / "out"
    spec = RunSpec(environment="calculator", groups=2, group_size=3)
    model = find_model("sprout")
    tokenizer = Tokenizer.load(model)

    async def main() -> None:
        setup = Setup(
            environment=registry.load(spec.environment), engine=local_engine(model, tokenizer, spec.engine),
            renderer=renderer_for(model, tokenizer), spec=spec,
        )  # fmt: skip
        async with setup.engine:
            with RunFolder.create(folder, spec, {}) as opened:
                await run(setup, spec, opened, MemorySink())

    anyio.run(main)
    return folder


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


def test_read_records(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("read_records.py")["main"](demo)
    printed = capsys.readouterr().out
    assert printed.count("reward ") == 6
    assert printed.count("sampled by policy versions {0}") == 6


def test_policy_gradient(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("policy_gradient.py")["main"](demo, tmp_path / "new")
    words = capsys.readouterr().out.split()
    assert words[:2] == ["6", "rows,"]
    assert float(words[-1]) < 1e-3
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "new").iterdir()
    }


def test_one_episode(capsys: pytest.CaptureFixture[str]) -> None:
    anyio.run(script("one_episode.py")["main"])
    printed = capsys.readouterr().out
    assert printed.startswith("eval-")
    assert "assistant:" in printed
    assert "<|im_end|>" in printed


def test_the_baseline_of_grpo_counts_an_episode_as_its_gradient_is_large() -> None:
    """Two successes with p = 1/2 in one token, g = 1/4 each; a failure with p = 0, g = 1: b = 0.5 / 1.5."""
    episodes = [
        EpisodeRecord(
            task_id="a", member=member, attempt=0, seed=0, status="ok", stop_reason=StopReason.COMPLETED,
            truncated=False, reward=reward, branches=[BranchRecord(
                name="main", token_ids=Ids([1, 5 + member]), mask=Mask([0, 1]), logprobs=Floats([0.0, logprob]),
                versions=Ids([-1, 0]),
            )],
        )
        for member, (reward, logprob) in enumerate([(1.0, -math.log(2)), (1.0, -math.log(2)), (0.0, -math.inf)])
    ]  # fmt: skip
    group = Group(group_record("a", [1.0, 1.0, 0.0]), episodes)
    trees_of = script("grpo.py")["trees_of"]
    [tree] = trees_of([group], use_mean=False)
    assert tree.advantages_S.tolist() == pytest.approx([2 / 3, 2 / 3, -1 / 3])
    [tree] = trees_of([group], use_mean=True)
    assert tree.advantages_S.tolist() == pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5)])


def test_grpo_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step, then a second one in a second run, which starts from the checkpoint and adds to the same files."""
    for steps in ("1", "2"):
        module = runpy.run_path(str(EXAMPLES / "grpo.py"))
        module["main"].__globals__.update(GROUP_SIZE=4, BATCH=1, EVAL_TASKS=2)
        monkeypatch.setattr("sys.argv", ["grpo.py", "-o", str(tmp_path), "--steps", steps, "--eval-every", "1"])
        module["main"]()
    run = tmp_path / "seed-0"
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all("eval" in line for line in lines)
    assert max(line["mean_difference"] for line in lines[1:]) < 0.05
    versions = {v for one in RunFolder(run).trajectories() for b in one.branches for v in b.versions}
    assert {0, 1} <= versions
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "| seed-0 | 2 |" in (tmp_path / "table.md").read_text()
