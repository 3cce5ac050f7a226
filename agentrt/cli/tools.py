"""`agentrt tools`: which tools there are, whether one is in order, and a call of one, as an episode would make it."""

import math
import sys
from typing import Annotated, Any

import anyio
import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from agentrt.cli.isolation import report
from agentrt.core import json
from agentrt.core.errors import AgentrtError, UsageError
from agentrt.env import tool as tools
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.probe import shared
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox, require

app = typer.Typer(no_args_is_help=True, help="List, check and call tools.")

NameOrPath = Annotated[str, typer.Argument(metavar="TOOL", help="A shipped tool's name, or the path of a program.")]


@app.command("list")
def list_tools() -> None:
    """The shipped tools and what the model is told of them."""
    console = Console(highlight=False, soft_wrap=True)
    found = [tools.tool(name) for name in tools.shipped()]
    width = max(len(each.name) for each in found)
    for each in found:
        console.print(f"{each.name:<{width}}  {escape(each.description)}")


@app.command()
def check(name: NameOrPath) -> None:
    """Say whether a tool is in order: its manifest, its schema, and the isolation it needs here.

    Example: [cyan]agentrt tools check my_tool.py[/cyan]
    """
    found = tools.tool(name)
    found.refusal({})  # a schema that is none raises
    isolation = shared().isolation
    require(found.terms, isolation, allow_weak=False)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(found.name)}[/bold]  {escape(found.description)}")
    console.print(f"arguments  {escape(msgspec.json.encode(found.parameters).decode())}")
    for field in ("protocol", "imports", "readable"):
        console.print(f"{field:<9}  {escape(str(getattr(found.terms, field)))}")
    for field in found.terms.limits.__struct_fields__:
        console.print(f"limit      {field} {getattr(found.terms.limits, field)}")
    console.print(escape(report(isolation)))


@app.command()
def call(
    name: NameOrPath,
    arguments: Annotated[str, typer.Argument(help="One JSON object.")] = "{}",
    seconds: Annotated[float, typer.Option(help="The call's limit.")] = 20.0,
) -> None:
    """Call a tool in a sandbox of its own and print its result.

    Example: [cyan]agentrt tools call calculator '{"expression": "2 * 3"}'[/cyan]
    """
    if not 0 < seconds < math.inf:
        raise UsageError(f"--seconds must be above 0, not {seconds:g}")
    found = tools.tool(name)
    try:
        request = json.decode(arguments, dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"the arguments are no JSON object: {error}") from error
    refusal = found.refusal(request)
    if refusal:
        raise UsageError(refusal)
    shared()  # here, because it blocks
    result = anyio.run(_called, found, request, seconds)
    print(result.text, end="" if result.text.endswith("\n") else "\n")
    print(result.stderr, end="", file=sys.stderr)
    end = f"{result.outcome} in {result.seconds:.3f} s at {result.isolation}"
    if result.outcome != "ok":
        raise AgentrtError(end)
    print(end, file=sys.stderr)


async def _called(found: tools.Tool, request: dict[str, Any], seconds: float) -> ToolResult:
    with Sandbox(Permits(1)) as sandbox:
        return await sandbox.call(found.argv, request, seconds=seconds, terms=found.terms)
