"""`agentrt export`: a run's records in another format."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrt.core.errors import UsageError
from agentrt.rollout.export import to_parquet


def export(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    to: Annotated[Literal["parquet"], typer.Option(help="The format.")] = "parquet",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new file.  \\[default: FOLDER/trajectories.parquet]")
    ] = None,
    with_failures: Annotated[
        bool, typer.Option("--with-failures", help="Every attempt, not only the good one of each episode.")
    ] = False,
) -> None:
    """Write the branches of a run's episodes as a table, one row each, for pandas, datasets and trainers.

    Example: [cyan]agentrt export outputs/demo --to parquet[/cyan]
    """
    target = output or folder / f"trajectories.{to}"
    if target.exists():
        raise UsageError(f"{target} exists; choose another file with -o, or delete it")
    count = to_parquet(folder, target, with_failures=with_failures)
    print(f"{target}: {count} rows, one for each branch of an episode")
