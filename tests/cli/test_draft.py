"""`agentrt draft train` over a tiny recorded run: a head that the engine takes, and bad input."""

import json
from pathlib import Path

import anyio
import msgspec
import pytest
from typer.testing import CliRunner

from agentrt.cli import app
from agentrt.core.errors import UsageError
from agentrt.core.models import find_model
from agentrt.core.records import EpisodeRecord, StopReason, TurnRecord, branch_record
from agentrt.core.spec import EngineSpec, RunSpec
from agentrt.core.tokenizer import Tokenizer
from agentrt.core.tokens import Tokens
from agentrt.engine.local import local_engine
from agentrt.env.chat.choose import renderer_for
from agentrt.env.chat.message import Message
from agentrt.rollout.setup import law_of_turns
from agentrt.rollout.sink import RunFolder

SPEC = RunSpec(environment="x")


async def played(draft: str = "") -> list[EpisodeRecord]:
    """Three short conversations with sprout."""
    folder = find_model("sprout")
    tokenizer = Tokenizer.load(folder)
    renderer = renderer_for(folder, tokenizer)
    spec = EngineSpec(kv_tokens=1024, host_tokens=0, speculate="auto" if draft else "off", draft=draft, debug=True)
    records = []
    async with local_engine(folder, tokenizer, spec) as engine:
        for seed in range(3):
            with engine.session(seed=seed) as session:
                prompt = renderer.prompt([Message("user", f"What is {seed} + 3?")], ())
                done = await session.sample(prompt, law_of_turns(SPEC, renderer), max_tokens=12)
                start = done.context_tokens
                turn = TurnRecord(
                    start=start, end=start + len(done.token_ids), seed=done.seed, finish_reason=done.finish_reason,
                    cached_tokens=done.cached_tokens, oldest_kv=done.oldest_kv,
                )  # fmt: skip
                records.append(
                    EpisodeRecord(
                        task_id="t", member=seed, attempt=0, seed=1, status="ok", stop_reason=StopReason.COMPLETED,
                        truncated=False, reward=1.0, branches=[branch_record("main", session.tokens, [turn])],
                    )
                )  # fmt: skip
    return records


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_head_is_trained_and_taken(kind: str, tmp_path: Path) -> None:
    plain = anyio.run(played)
    with RunFolder.create(tmp_path / "run", SPEC, {}) as run:
        for record in plain:
            run.write(record)
    command = ["draft", "train", str(tmp_path / "run"), "--kind", kind, "--steps", "2", "--vocabulary", "300", "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["folder"], found["texts"], found["held_out"]) == (str(tmp_path / "run" / "draft"), 2, 1)
    assert len(found["before"]) == len(found["after"]) == 3
    drafted = anyio.run(played, found["folder"])
    assert [record.branches for record in drafted] == [record.branches for record in plain]


def test_report_and_replay(tmp_path: Path) -> None:
    """Proposed length, accepted length, generation time, total time, in this order; the replay says the same text."""
    none = TurnRecord(start=1, end=1, seed=0, finish_reason="client_abort")  # ended before its first id
    tokens = Tokens()
    tokens.observe([1])
    ended = branch_record("main", tokens, [none])
    with RunFolder.create(tmp_path / "run", SPEC, {}) as run:
        for record in anyio.run(played):
            run.write(record)
        run.write(msgspec.structs.replace(record, member=3, branches=[ended]))
    for options in ([], ["--replay"]):
        command = ["draft", "report", str(tmp_path / "run"), *options, "--json"]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0
        assert "said something else" not in result.stderr
        rows = json.loads(result.stdout.splitlines()[-1])
        assert [(row["name"], row["turns"]) for row in rows] == [("run", 3), ("version 0", 3), ("turn 1", 3)]
        names = list(rows[0])[2:6]
        assert names == ["proposed_length", "accepted_length", "generation_seconds", "total_seconds"]
        assert (rows[0]["off_total_seconds"] is not None) == bool(options)


def test_bad_input(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", SPEC, {}):
        pass
    for options, said in (
        (["--steps", "0"], "--steps must be 1 or more, not 0"),
        (["--kind", "eagle"], "unknown --kind 'eagle'; did you mean 'eagle3'"),
        (["-o", str(tmp_path)], "exists; give another folder with --output"),
        ([], "0 trajectories have sampled ids; training a draft takes 2 at least"),
    ):
        with pytest.raises(UsageError, match=said):
            CliRunner().invoke(app, ["draft", "train", str(tmp_path / "run"), *options], catch_exceptions=False)
