"""`agentrt describe`: what an environment is, without running it."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from agentrt.env import registry


def describe(
    environment: Annotated[str, typer.Argument(help="A name, a module path or a file; without one, all names.")] = "",
) -> None:
    """Print an environment's docstring, splits, tools and rewards.

    Examples: [cyan]agentrt describe[/cyan], [cyan]agentrt describe calculator[/cyan], [cyan]agentrt describe my_env.py[/cyan]
    """
    console = Console(highlight=False, soft_wrap=True)
    if not environment:
        console.print("\n".join(registry.names()))
        return
    about = registry.describe(registry.load(environment))
    console.print(f"[bold]{escape(about.name)}[/bold]\n\n{escape(about.doc)}\n")
    console.print(f"splits   {escape(', '.join(about.splits))}")
    for name, text in about.tools.items():
        console.print(f"tool     {escape(name)}: {escape(text)}")
    for name, weight in about.rewards.items():
        console.print(f"reward   {escape(name)}, weight {weight:g}")
    for name in about.metrics:
        console.print(f"metric   {escape(name)}")
