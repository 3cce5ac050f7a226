"""The options that commands share, each with its one text for `--help`."""

from pathlib import Path
from typing import Annotated

import typer

EnvironmentName = Annotated[
    str | None, typer.Argument(help="A name (`agentrt describe` lists them), a module path or a file.")
]
Model = Annotated[
    str | None, typer.Option(help="A model's name, its folder, or org/name on the hub.  \\[default: sprout]")
]
GroupSize = Annotated[int | None, typer.Option(help="Episodes of each task.  \\[default: 4]")]
Seed = Annotated[int | None, typer.Option(help="The same seed samples the same ids.  \\[default: 0]")]
Servers = Annotated[
    list[str] | None, typer.Option(help="A server that runs the model, instead of this process; repeatable.")
]
Config = Annotated[Path | None, typer.Option(help="A TOML file with the spec; options override it.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the spec, dotted; repeatable.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the whole spec and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="End standard output with the result as one JSON object.")]
