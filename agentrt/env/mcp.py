"""Tools of an MCP server: any program that speaks the Model Context Protocol on its standard input and output.

The server runs in the episode's sandbox, one for all its tools, and lives as long as the episode; the bridge that speaks
the protocol with it (`agentrt_tools.mcp_bridge`) is in there too, so nothing that a server says is taken apart here.
"""

import os
import shlex
import sys
import sysconfig
from pathlib import Path
from typing import Any

import anyio
import msgspec

from agentrt.core.errors import UsageError
from agentrt.env.tool import Tool, shipped_folder
from agentrt.sandbox.probe import in_thread
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox
from agentrt.sandbox.terms import Terms, ToolLimits

START_SECONDS = 30.0
"""For a server to start and say what it has."""
DEFAULT_LIMITS = ToolLimits()
PYTHONS = ("python", "python3")


class _Described(msgspec.Struct):
    name: str
    inputSchema: dict[str, Any]
    description: str = ""


def mcp_tools(command: str, limits: ToolLimits = DEFAULT_LIMITS) -> list[Tool]:
    """Every tool of the server that `command` starts, which it does once, here, to ask.

    `python` is this interpreter, with the packages installed for it. Arguments that are files may be read by the server.
    There is no network, so a command that installs something first fails. Raises `UsageError` with what went wrong.
    """
    words = shlex.split(command)
    if not words:
        raise UsageError("mcp: is followed by the command that starts the server")
    if words[0] in PYTHONS:
        words[0] = os.path.realpath(sys.executable)
    words = [str(Path(word).resolve()) if os.path.exists(word) else word for word in words]
    packages = [*dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))]
    bridge = shipped_folder() / "mcp_bridge.py"
    argv = (os.path.realpath(sys.executable), "-I", "-S", str(bridge), ":".join(packages), *words)
    files = [word for word in words if os.path.isfile(word)]
    terms = Terms(protocol="worker", limits=limits, readable=(str(bridge.parent), *packages, *files))

    async def ask() -> ToolResult:
        with Sandbox(anyio.CapacityLimiter(1)) as sandbox:
            return await sandbox.call(argv, {"name": "", "arguments": {}}, seconds=START_SECONDS, terms=terms)

    result = in_thread(ask)
    if result.outcome != "ok":
        raise UsageError(f"{command}: the MCP server gives no list of tools: {result.text} {result.stderr}".strip())
    found = msgspec.json.decode(result.text, type=list[_Described])
    return [
        Tool(
            name=each.name, description=each.description, parameters=each.inputSchema, argv=argv,
            terms=msgspec.structs.replace(terms, method=each.name),
        )
        for each in found
    ]  # fmt: skip
