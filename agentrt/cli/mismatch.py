"""`agentrt mismatch`: how far a run's recorded logprobs are from a computation from scratch, by what the KV went through."""

import sys
import time
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from agentrt.cli.console import results, say
from agentrt.cli.options import AsJson
from agentrt.core.errors import UsageError
from agentrt.core.models import find_model
from agentrt.core.protocol import Engine
from agentrt.core.spec import SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.choose import renderer_for
from agentrt.rollout.mismatch import (
    Chosen,
    Distance,
    ScoredTurn,
    broken_bounds,
    choose,
    distances,
    key_of,
    require_model,
    rescore,
)
from agentrt.rollout.setup import law_of_turns
from agentrt.rollout.sink import RunFolder, StoredRun, stored_run

EXCEEDED = 1
QUIET_SECONDS = 5.0
"""Between two lines on how far it is."""


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    folder: str
    model: str
    version: int
    trajectories: int
    finished: int
    """How many there were to choose from."""
    tokens: int
    other_version_tokens: int
    """Sampled by other policy versions, so not scored."""
    seconds: float
    paths: dict[str, Distance]


def mismatch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    share: Annotated[float, typer.Option(help="Of the finished trajectories, this share is scored.")] = 0.1,
    model: Annotated[
        str | None, typer.Option(help="The weights to score with: a name or a folder.  \\[default: the run's own]")
    ] = None,
    version: Annotated[
        int, typer.Option(help="The policy version that these weights are; tokens of others are only counted.")
    ] = 0,
    bound_mean: Annotated[
        float | None, typer.Option(help="Fail if the mean |Δlogprob| of any path is above this.")
    ] = None,
    bound_max: Annotated[
        float | None, typer.Option(help="Fail if the maximum |Δlogprob| of any path is above this.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score finished trajectories again, from scratch and in full precision, and compare the logprobs with the recorded ones.

    Split by path: what the KV that a turn attended went through (cold, cached, restored, recomputed, kept), and
    whether drafts were verified in it. Exit code 1 if a bound is exceeded, or if nothing could be compared.

    Examples:

    [cyan]agentrt mismatch outputs/demo[/cyan]

    [cyan]agentrt mismatch outputs/demo --share 1 --bound-mean 0.001 --bound-max 0.05 --json[/cyan]

    [cyan]agentrt mismatch outputs/grpo --model checkpoints/step-40 --version 40[/cyan]
    """
    if not 0 < share <= 1:
        raise UsageError(f"--share must be above 0 and at most 1, not {share:g}")
    if version != 0 and model is None:
        raise UsageError(f"--version {version} needs --model: the run's own model is version 0")
    for name, bound in (("mean", bound_mean), ("max", bound_max)):
        if bound is not None and not bound >= 0:
            raise UsageError(f"--bound-{name} must be 0 or more, not {bound:g}")
    run, records = stored_run(folder), RunFolder.resume(folder)
    chosen = choose(records.trajectories(), share)
    if not chosen.keys:
        raise UsageError(f"{folder} has no finished trajectory yet; go on with `agentrt run --resume {folder}`")
    found = _measured(records, run, chosen, model or run.spec.model, version)
    results().print(_rendered(found))
    if as_json:
        print(msgspec.json.encode(found).decode(), flush=True)
    failures = broken_bounds(found.paths, bound_mean, bound_max)
    if not found.tokens:
        failures = [f"no token of version {version} is in what was chosen; give a --model and its --version"]
    for failure in failures:
        print(f"agentrt: {failure}", file=sys.stderr)
    if failures:
        raise typer.Exit(EXCEEDED)


def _measured(records: RunFolder, run: StoredRun, chosen: Chosen, model: str, version: int) -> Mismatch:
    """Score what is chosen with a reference engine over `model`."""
    started = time.perf_counter()
    model_folder = find_model(model)
    tokenizer = Tokenizer.load(model_folder)
    say(f"loading {model} as the reference")
    from agentrt.engine.local import reference_engine  # here, because it imports torch

    engine = reference_engine(model_folder, tokenizer, kv_tokens=chosen.longest + 2 * run.spec.engine.page_size)
    require_model(chosen, engine.info, run.versions.get("model", "") if version == 0 else "")
    law = law_of_turns(run.spec, renderer_for(model_folder, tokenizer))
    turns = anyio.run(_scored, engine, records, chosen, law, version)
    return Mismatch(
        folder=str(records.path), model=model, version=version, trajectories=len(chosen.keys), finished=chosen.finished,
        tokens=sum(len(turn.recorded) for turn in turns), other_version_tokens=sum(turn.num_other for turn in turns),
        seconds=time.perf_counter() - started, paths=distances(turns),
    )  # fmt: skip


async def _scored(
    engine: Engine, records: RunFolder, chosen: Chosen, law: SamplingParams, version: int
) -> list[ScoredTurn]:
    turns: list[ScoredTurn] = []
    done, spoke = 0, time.monotonic()
    async with engine:
        for record in records.trajectories():
            if key_of(record) in chosen.keys:
                turns += await rescore(engine, record, law, version)
                done += 1
                if time.monotonic() - spoke >= QUIET_SECONDS:
                    spoke = time.monotonic()
                    say(f"scored {done} of {len(chosen.keys)} trajectories")
    return turns


def _rendered(found: Mismatch) -> Group:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("path")
    for name in ("tokens", "mean |Δ|", "max |Δ|", "KL", "ratio p1", "p50", "p99", "cut"):
        table.add_column(name, justify="right")
    for row, one in found.paths.items():
        ratios = (f"{value:.4f}" for value in (one.ratio_p1, one.ratio_p50, one.ratio_p99))
        table.add_row(
            row, str(one.tokens), f"{one.mean:.2e}", f"{one.maximum:.2e}", f"{one.kl:.2e}", *ratios, str(one.cut)
        )
    lines = [
        f"{found.trajectories} of {found.finished} finished trajectories of {found.folder}, scored again with "
        f"{found.model} as version {found.version} in {found.seconds:.0f} s"
    ]
    if found.other_version_tokens:
        lines.append(
            f"{found.other_version_tokens} tokens are of other policy versions: without their weights they cannot be scored"
        )
    shown = [escape(line) for line in lines]
    return Group(*shown, "", table) if found.paths else Group(*shown)
