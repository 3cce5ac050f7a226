"""`agentrt eval`: how good a model is on tasks it was not trained on, with intervals, in a folder of its own."""

import math
from pathlib import Path
from typing import Annotated

import msgspec
import tomli_w
import typer
from rich.console import Group

from agentrt.cli.console import results
from agentrt.cli.launch import INTERRUPTED, checked_environment, launch, named_by
from agentrt.cli.options import AsJson, Assignments, Config, DryRun, EnvironmentName, GroupSize, Model, Seed, Servers
from agentrt.cli.spec import chosen_spec, servers
from agentrt.core.errors import UsageError
from agentrt.core.spec import to_toml
from agentrt.report import evaluation, summary

TRAINING = "train"


def evaluate(
    environment: EnvironmentName = None,
    model: Model = None,
    split: Annotated[str | None, typer.Option(help="Held-out or adversarial tasks.  \\[default: eval]")] = None,
    groups: Annotated[int | None, typer.Option(help="How many tasks.  \\[default: 32]")] = None,
    group_size: GroupSize = None,
    seed: Seed = None,
    success: Annotated[float, typer.Option(help="The reward from which on an episode has passed, for pass@k.")] = 1.0,
    engine: Servers = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new folder.  \\[default: outputs/eval-ENVIRONMENT-TIME]")
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
    resume: Annotated[Path | None, typer.Option(help="Finish the evaluation in this folder.")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on held-out tasks: pass@k and each reward's mean, with confidence intervals.

    Examples:

    [cyan]agentrt eval calculator[/cyan]

    [cyan]agentrt eval lookup --split adversarial --model smollm2-135m --group-size 1[/cyan]
    """
    options = {
        "environment": environment, "model": model, "split": split, "groups": groups, "group_size": group_size, "seed": seed,
    }  # fmt: skip
    if not math.isfinite(success):
        raise UsageError(f"--success must be a finite number, not {success:g}")
    assignments = [*(assignments or []), *servers(engine)]
    spec = chosen_spec("eval", config, options, assignments, resume, output)
    if spec.split == TRAINING:
        raise UsageError("an evaluation takes held-out tasks; choose another --split, or use `agentrt run`")
    loaded = checked_environment(spec)
    if dry_run:
        print(tomli_w.dumps(to_toml(spec)), end="")
        return
    path = resume or output or named_by(spec.environment, "eval-")
    launched = launch(spec, loaded, path, is_resumed=resume is not None)
    records = list(launched.folder.trajectories())
    tools = [tool.name for tool in loaded.tools]
    found = evaluation.evaluate(records, success)
    ran = summary.summarise(records, spec.groups * spec.group_size, tools)
    tail = summary.render(ran, launched.seconds, launched.sampled, str(path), with_rewards=False)
    results().print(Group(evaluation.render(found), tail))
    if as_json:
        result = {"folder": str(path), "seconds": launched.seconds, "evaluation": found, "summary": ran}
        print(msgspec.json.encode(result).decode(), flush=True)
    if launched.is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if ran.good == 0:
        raise typer.Exit(1)
