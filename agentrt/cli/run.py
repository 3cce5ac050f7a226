"""`agentrt run`: roll out episodes of an environment with a model, into a folder."""

from pathlib import Path
from typing import Annotated

import msgspec
import tomli_w
import typer

from agentrt.cli.console import results
from agentrt.cli.launch import INTERRUPTED, Launched, checked_environment, launch, named_by
from agentrt.cli.options import AsJson, Assignments, Config, DryRun, EnvironmentName, GroupSize, Model, Seed, Servers
from agentrt.cli.spec import chosen_spec, servers
from agentrt.core.spec import to_toml
from agentrt.report.summary import Summary, render, summarise


def run(
    environment: EnvironmentName = None,
    model: Model = None,
    split: Annotated[str | None, typer.Option(help="Which tasks.  \\[default: train]")] = None,
    groups: Annotated[int | None, typer.Option(help="How many tasks.  \\[default: 4]")] = None,
    group_size: GroupSize = None,
    seed: Seed = None,
    engine: Servers = None,
    ray: Annotated[
        str | None, typer.Option(help="A Ray cluster (`auto`, HOST:PORT) for engines and episodes.", metavar="ADDRESS")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new folder.  \\[default: outputs/ENVIRONMENT-TIME]")
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
    resume: Annotated[Path | None, typer.Option(help="Finish the run in this folder.")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Roll out episodes and keep their trajectories.

    Examples:

    [cyan]agentrt run calculator[/cyan]

    [cyan]agentrt run calculator --groups 16 --group-size 8 --seed 1 -o outputs/demo[/cyan]

    [cyan]agentrt run my_env.py --set sampling.temperature=0.7 --set limits.max_turns=4[/cyan]

    [cyan]agentrt run --resume outputs/demo[/cyan]

    [cyan]agentrt run calculator --ray auto --set engine.engines=8[/cyan]
    """
    options = {
        "environment": environment, "model": model, "split": split, "groups": groups, "group_size": group_size, "seed": seed,
    }  # fmt: skip
    assignments = [*(assignments or []), *servers(engine)]
    spec = chosen_spec("run", config, options, assignments, resume, output)
    loaded = checked_environment(spec)
    if dry_run:
        print(tomli_w.dumps(to_toml(spec)), end="")
        return
    path = resume or output or named_by(spec.environment)
    launched = launch(spec, loaded, path, is_resumed=resume is not None, cluster=ray or "")
    tools = [tool.name for tool in loaded.tools]
    summary = summarise(launched.folder.trajectories(), spec.groups * spec.group_size, tools)
    _report(summary, launched, as_json)
    if launched.is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if summary.good == 0:
        raise typer.Exit(1)


def _report(summary: Summary, launched: Launched, as_json: bool) -> None:
    folder = str(launched.folder.path)
    results().print(render(summary, launched.seconds, launched.sampled, folder))
    if as_json:
        result = {
            "folder": folder, "seconds": launched.seconds, "attempts": launched.attempts, "summary": summary
        }  # fmt: skip
        print(msgspec.json.encode(result).decode(), flush=True)
