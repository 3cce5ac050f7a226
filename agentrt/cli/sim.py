"""`agentrt sim`: a whole run in virtual time on a simulated GPU, under one policy or several."""

from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer

from agentrt.cli.console import results
from agentrt.cli.options import AsJson
from agentrt.core.errors import UsageError
from agentrt.core.spec import KVPolicy, convert, load_toml, nearest


def sim(
    spec: Annotated[Path | None, typer.Argument(help="A TOML file; without it, the defaults.")] = None,
    policies: Annotated[str | None, typer.Option(help="KV policies to compare, with commas between them.")] = None,
    phi: Annotated[str | None, typer.Option(help="Oversubscriptions of the pool, with commas between them.")] = None,
    episodes: Annotated[int | None, typer.Option(help="How many episodes each cell has.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate agent traffic on a GPU: what each KV policy makes of it.

    Examples:

    [cyan]agentrt sim --episodes 64 --policies priced,lru --phi 0.8,2[/cyan]
    """
    from agentrt.sim.cell import simulate  # the engine behind it imports torch
    from agentrt.sim.spec import SimSpec
    from agentrt.sim.table import render

    where, data = str(spec or "sim"), load_toml(spec) if spec else {}
    given = convert(data if episodes is None else data | {"episodes": episodes}, SimSpec, where)
    cells = [
        simulate(convert(msgspec.to_builtins(given) | {"policy": policy, "phi": one}, SimSpec, where))
        for one in _numbers(phi, given.phi)
        for policy in chosen_policies(policies, given.policy)
    ]
    results().print(render(cells))
    if as_json:
        print(msgspec.json.encode({"cells": cells}).decode(), flush=True)


def chosen_policies(names: str | None, default: str) -> list[str]:
    """The policies named, or the default. `UsageError` for one that there is not."""
    known = (*get_args(KVPolicy), "unlimited")
    chosen = names.split(",") if names else [default]
    for name in chosen:
        if name not in known:
            raise UsageError(f"there is no policy {name!r}; {nearest(name, known)}")
    return chosen


def _numbers(text: str | None, default: float) -> list[float]:
    try:
        return [float(one) for one in text.split(",")] if text else [default]
    except ValueError as error:
        raise UsageError(f"--phi takes numbers with commas between them, not {text!r}") from error
