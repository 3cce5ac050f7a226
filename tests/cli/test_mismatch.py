"""`agentrt mismatch` over a tiny recorded run of the shipped model: what it prints, its bounds, and bad input."""

import json
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner

from agentrt.cli import app
from agentrt.core.errors import UsageError
from agentrt.core.models import find_model
from agentrt.core.records import EpisodeRecord, StopReason, TurnRecord, branch_record, decode, encode
from agentrt.core.spec import EngineSpec, RunSpec
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.local import local_engine
from agentrt.engine.service import EngineService
from agentrt.env.chat.choose import renderer_for
from agentrt.env.chat.message import Message
from agentrt.rollout.sink import RunFolder

SPEC = RunSpec(environment="x")


@pytest.fixture(scope="module")
def recorded() -> tuple[EpisodeRecord, str]:
    """An episode of two turns, and the hash of the model."""
    folder = find_model("sprout")
    tokenizer = Tokenizer.load(folder)
    renderer = renderer_for(folder, tokenizer)
    engine = local_engine(folder, tokenizer, EngineSpec(kv_tokens=1024, host_tokens=0))
    return anyio.run(
        _recorded, engine, renderer.prompt([Message("user", "What is 2 + 3?")], ())
    ), engine.info.model_hash


async def _recorded(engine: EngineService, prompt: list[int]) -> EpisodeRecord:
    law, turns = SPEC.sampling, []
    async with engine:
        with engine.session(seed=1) as session:
            for new in (prompt, prompt[:5]):
                done = await session.sample(new, law, max_tokens=12)
                start = done.context_tokens
                turns.append(
                    TurnRecord(
                        start=start, end=start + len(done.token_ids), seed=done.seed, finish_reason="length",
                        cached_tokens=done.cached_tokens, oldest_kv=done.oldest_kv,
                    )
                )  # fmt: skip
            branch = branch_record("main", session.tokens, turns)
    return EpisodeRecord(
        task_id="t", member=0, attempt=0, seed=1, status="ok", stop_reason=StopReason.COMPLETED, truncated=False, reward=1.0,
        branches=[branch],
    )  # fmt: skip


def stored(path: Path, record: EpisodeRecord | None, model_hash: str) -> Path:
    with RunFolder.create(path, SPEC, {"model": model_hash}) as run:
        if record is not None:
            run.write(record)
    return path


def mismatch(*arguments: str) -> tuple[int, str]:
    """Exit code and output; what is raised for `main` is raised here."""
    done = CliRunner().invoke(app, ["mismatch", *arguments])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_a_run_of_sprout_is_within_rounding_of_the_definition(
    recorded: tuple[EpisodeRecord, str], tmp_path: Path
) -> None:
    run = stored(tmp_path / "run", *recorded)
    code, output = mismatch(str(run), "--bound-mean", "1e-5", "--bound-max", "1e-4", "--json")
    assert code == 0, output
    found = json.loads(output.splitlines()[-1])
    assert (found["trajectories"], found["finished"], found["other_version_tokens"]) == (1, 1, 0)
    tokens = {row: one["tokens"] for row, one in found["paths"].items()}
    first, second = (turn.end - turn.start for turn in recorded[0].branches[0].turns)
    assert tokens == {"all": first + second, "cold": first, "cached": second}
    assert found["tokens"] == first + second
    assert found["paths"]["all"]["maximum"] < 1e-4
    assert found["paths"]["all"]["ratio_p50"] == pytest.approx(1.0, abs=1e-5)


def test_a_tampered_logprob_breaks_the_bound(recorded: tuple[EpisodeRecord, str], tmp_path: Path) -> None:
    record = decode(encode(recorded[0]), EpisodeRecord)
    record.branches[0].logprobs[record.branches[0].turns[1].start] -= 1.0
    run = stored(tmp_path / "run", record, recorded[1])
    code, output = mismatch(str(run), "--bound-max", "0.5")
    assert code == 1
    assert "maximum |Δlogprob| of path cached is 1, above the bound of 0.5" in output
    assert "of path cold" not in output
    assert mismatch(str(run))[0] == 0  # without a bound it only says


def test_other_versions_are_counted_apart(recorded: tuple[EpisodeRecord, str], tmp_path: Path) -> None:
    run = stored(tmp_path / "run[" / "x]", *recorded)  # which is no markup
    code, output = mismatch(str(run), "--model", "sprout", "--version", "4")
    assert code == 1
    assert "run[/x],scoredagainwithsproutasversion4" in "".join(output.split())
    assert "tokens are of other policy versions" in output
    assert "no token of version 4 is in what was chosen" in output


def test_bad_input_is_one_sentence(recorded: tuple[EpisodeRecord, str], tmp_path: Path) -> None:
    record, model_hash = recorded
    empty, run = stored(tmp_path / "empty", None, model_hash), stored(tmp_path / "run", record, model_hash)
    other = stored(tmp_path / "other", record, "0123")
    for arguments, words in (
        ([str(tmp_path / "none")], "not a run folder"),
        ([str(empty)], f"{empty} has no finished trajectory yet; go on with `agentrt run --resume {empty}`"),
        ([str(other)], "was sampled by the weights 0123, and sprout has others"),
        ([str(run), "--share", "0"], "--share must be above 0 and at most 1, not 0"),
        ([str(run), "--version", "3"], "--version 3 needs --model"),
        ([str(run), "--bound-max", "-1"], "--bound-max must be 0 or more, not -1"),
        ([str(run), "--model", "sprot"], "did you mean 'sprout'?"),
    ):
        with pytest.raises(UsageError) as raised:
            mismatch(*arguments)
        assert words in str(raised.value), arguments
        assert "\n" not in str(raised.value)


def test_the_help_has_examples() -> None:
    code, output = mismatch("--help")
    assert code == 0
    assert "agentrt mismatch outputs/demo" in output
