"""`agentrt init`: a first environment to change."""

from pathlib import Path
from typing import Annotated

import typer

from agentrt.core.errors import RecordError, UsageError

STARTER = Path(__file__).parent / "starter.py"
"""An environment that runs as it is. It is copied, not filled in, so what we check is what the user gets."""


def init(
    path: Annotated[Path, typer.Argument(help="A new Python file.")] = Path("my_env.py"),
) -> None:
    """Write a commented environment that runs as it is.

    Example: [cyan]agentrt init my_env.py[/cyan]
    """
    if path.suffix != ".py":
        raise UsageError(f"{path}: an environment's file ends in .py")
    if path.exists():
        raise UsageError(f"{path} exists; choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(STARTER.read_bytes())
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}") from error
    print(f"{path} is there. What now:\n  agentrt describe {path}\n  agentrt run {path}\n  agentrt eval {path}")
