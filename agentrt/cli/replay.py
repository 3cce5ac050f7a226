"""`agentrt replay`: a recorded run through other KV policies, in virtual time, without its model."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from agentrt.cli.console import results
from agentrt.cli.options import AsJson
from agentrt.cli.sim import chosen_policies
from agentrt.core.errors import UsageError


def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    policy: Annotated[str, typer.Option(help="KV policies, with commas between them.")] = "priced,lru",
    model: Annotated[str, typer.Option(help="Whose speed the simulated device has.")] = "qwen3-8b",
    link: Annotated[float, typer.Option(help="Gigabytes a second between device and host, each way.")] = 50.0,
    pool: Annotated[int | None, typer.Option(help="Ids that fit the device.  \\[default: as many as then]")] = None,
    as_json: AsJson = False,
) -> None:
    """Play a recorded run again under other KV policies: its turns, tools and times, on a simulated GPU.

    Examples:

    [cyan]agentrt replay outputs/demo --policy priced,lru,infercept[/cyan]
    """
    from agentrt.core.spec import convert  # the engine behind the rest imports torch
    from agentrt.sim.cell import simulate
    from agentrt.sim.replay import ReplayLoad, recording, replay_spec
    from agentrt.sim.spec import SimSpec
    from agentrt.sim.table import render

    recorded = recording(folder)
    page = recorded.spec.engine.page_size
    if pool is not None and pool < page:
        raise UsageError(f"--pool must hold a page of {page} ids at least, not {pool}")
    spec = replay_spec(recorded, pool or 0)
    given = {"model": model, "link_gigabytes": link}
    cells = [
        simulate(convert(msgspec.to_builtins(spec) | given | {"policy": name}, SimSpec, "replay"), ReplayLoad(recorded))
        for name in chosen_policies(policy, spec.policy)
    ]
    results().print(render(cells))
    if as_json:
        print(msgspec.json.encode({"cells": cells}).decode(), flush=True)
