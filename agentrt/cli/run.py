"""`agentrt run`: roll out episodes of an environment with a model, into a folder."""

import platform
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import anyio
import msgspec
import typer
from rich.console import Console

from agentrt.cli.spec import build_spec
from agentrt.core.errors import AgentrtError, UsageError
from agentrt.core.models import find_model
from agentrt.core.protocol import EngineInfo
from agentrt.core.spec import RunSpec
from agentrt.core.tokenizer import Tokenizer
from agentrt.env import registry
from agentrt.env.chat.chatml import ChatML
from agentrt.env.environment import Environment
from agentrt.report.log import logging_to
from agentrt.report.progress import ProgressLines
from agentrt.report.summary import Summary, render, summarise
from agentrt.rollout.order import check_split
from agentrt.rollout.run import run as roll_out
from agentrt.rollout.setup import Setup
from agentrt.rollout.sink import RunFolder, require_same, spec_toml, stored_run

if TYPE_CHECKING:
    from agentrt.engine.service import EngineService

SWITCH_SECONDS = 0.0005
"""Of the interpreter between threads: a busy loop starved the step thread for minutes at the default of 5 ms."""
INTERRUPTED = 130


def run(
    environment: Annotated[
        str | None, typer.Argument(help="A name (`agentrt describe` lists them), a module path or a file.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model's name or folder.  \\[default: sprout]")] = None,
    split: Annotated[str | None, typer.Option(help="Which tasks.  \\[default: train]")] = None,
    groups: Annotated[int | None, typer.Option(help="How many tasks.  \\[default: 4]")] = None,
    group_size: Annotated[int | None, typer.Option(help="Episodes of each task.  \\[default: 4]")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed samples the same ids.  \\[default: 0]")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new folder.  \\[default: outputs/ENVIRONMENT-TIME]")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with the spec; options override it.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the spec, dotted; repeatable.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Finish the run in this folder.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the whole spec and stop.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End standard output with the summary as one JSON object.")
    ] = False,
) -> None:
    """Roll out episodes and keep their trajectories.

    Examples:

    [cyan]agentrt run calculator[/cyan]

    [cyan]agentrt run calculator --groups 16 --group-size 8 --seed 1 -o outputs/demo[/cyan]

    [cyan]agentrt run my_env.py --set sampling.temperature=0.7 --set limits.max_turns=4[/cyan]

    [cyan]agentrt run --resume outputs/demo[/cyan]
    """
    options = {
        "environment": environment, "model": model, "split": split, "groups": groups, "group_size": group_size, "seed": seed,
    }  # fmt: skip
    spec = _chosen_spec(config, options, assignments or [], resume)
    if resume is not None and output is not None and output != resume:
        raise UsageError("--resume goes on in its own folder; leave -o out")
    environment_object = registry.load(spec.environment, **spec.environment_args)
    check_split(environment_object, spec.split)
    if dry_run:
        print(spec_toml(spec), end="")
        return
    model_folder = find_model(spec.model)
    tokenizer = Tokenizer.load(model_folder)
    renderer = ChatML(tokenizer)
    engine = _engine(model_folder, tokenizer, spec)
    folder = _run_folder(spec, environment_object, engine.info, output, resume)
    setup = Setup(environment=environment_object, engine=engine, renderer=renderer, spec=spec)
    started = time.perf_counter()
    with folder, logging_to(folder.path / "logs"):
        progress = ProgressLines(sys.stderr, groups=spec.groups, episodes=spec.groups * spec.group_size)
        sys.setswitchinterval(SWITCH_SECONDS)
        ended = anyio.run(_roll_out, setup, spec, folder, progress)
        summary = summarise(folder.trajectories(), spec.groups * spec.group_size)
    _report(summary, time.perf_counter() - started, folder, ended, as_json)
    if ended.is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if summary.good == 0:
        raise typer.Exit(1)


def _chosen_spec(config: Path | None, options: dict[str, Any], assignments: list[str], resume: Path | None) -> RunSpec:
    """The spec asked for. A resumed run has its own; asking for another one at the same time is refused."""
    is_given = config is not None or bool(assignments) or any(value is not None for value in options.values())
    if resume is None:
        return build_spec(config, options, assignments)
    stored = stored_run(resume)
    if is_given:
        require_same(resume, stored.spec, build_spec(config, {"environment": stored.spec.environment} | options, assignments))
    return stored.spec


def _engine(model_folder: Path, tokenizer: Tokenizer, spec: RunSpec) -> "EngineService":
    _say(f"loading {spec.model} (the first time also compiles kernels, for up to a minute)")
    from agentrt.engine.local import local_engine  # here, because it imports torch and numba

    return local_engine(model_folder, tokenizer, spec.engine)


def _run_folder(
    spec: RunSpec, environment: Environment, engine: EngineInfo, output: Path | None, resume: Path | None
) -> RunFolder:
    if resume is not None:
        return RunFolder.resume(resume)
    name = Path(spec.environment.partition(":")[0]).stem
    path = output or Path("outputs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    versions = {name: version(name) for name in ("agentrt", "torch", "numba", "tokenizers")} | {
        "python": platform.python_version(), "model": engine.model_hash,
        "environment": registry.describe(environment).source_hash,
    }  # fmt: skip
    _say(f"{spec.environment} with {spec.model}: {spec.groups} groups of {spec.group_size} into {path}")
    return RunFolder.create(path, spec, versions)


class _Ended(NamedTuple):
    attempts: int
    is_interrupted: bool


async def _roll_out(setup: Setup, spec: RunSpec, folder: RunFolder, progress: ProgressLines) -> _Ended:
    """Run what is left. The first SIGINT or SIGTERM ends it in order; the second one is the system's."""
    attempts, failure = 0, None
    async with setup.engine, anyio.create_task_group() as watching:
        with anyio.CancelScope() as work:
            watching.start_soon(_cancel_on_signal, work)
            try:
                attempts = await roll_out(setup, spec, folder, progress)
            except AgentrtError as error:
                failure = error
        watching.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return _Ended(attempts, work.cancelled_caught)


async def _cancel_on_signal(work: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            _say("interrupted: episodes in flight are dropped, all others are kept; go on with --resume")
            work.cancel()
            return


def _report(summary: Summary, seconds: float, folder: RunFolder, ended: _Ended, as_json: bool) -> None:
    if not ended.attempts and not ended.is_interrupted:
        _say("this run is complete: nothing was left to do")
    Console(highlight=False).print(render(summary, seconds, str(folder.path)))
    if as_json:
        result = {"folder": str(folder.path), "seconds": seconds, "attempts": ended.attempts, "summary": summary}
        print(msgspec.json.encode(result).decode(), flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
