"""Tools of an MCP server: any program that speaks the Model Context Protocol on its standard input and output.

The server runs in the episode's sandbox, one for all its tools, and lives as long as the episode. The `mcp` package speaks
with it, which the extra `mcp` installs.
"""

import os
import shlex
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from agentrt.core import json
from agentrt.core.errors import UsageError
from agentrt.env.tool import Tool
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.probe import in_thread
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox
from agentrt.sandbox.terms import Terms, ToolLimits

START_SECONDS = 30.0
"""For a server to start and say what it has."""
LIST_BYTES = 16 * 2**20
"""The longest list of tools that is read."""
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
    if find_spec("mcp") is None:
        raise UsageError("MCP servers need the package mcp: pip install 'agentrt[mcp]'")
    words = shlex.split(command)
    if not words:
        raise UsageError("mcp: is followed by the command that starts the server")
    if words[0] in PYTHONS:
        words[0] = os.path.realpath(sys.executable)
    words = [str(Path(word).resolve()) if os.path.exists(word) else word for word in words]
    files = [word for word in words if os.path.isfile(word)]
    packages = [*dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))]
    argv = tuple(words)
    terms = Terms(
        protocol="mcp", limits=limits, readable=(*packages, *files), environment={"PYTHONPATH": ":".join(packages)}
    )

    return [
        Tool(
            name=each.name, description=each.description, parameters=each.inputSchema, argv=argv,
            terms=msgspec.structs.replace(terms, method=each.name),
        )
        for each in _asked(command, argv, terms)
    ]  # fmt: skip


def _asked(command: str, argv: tuple[str, ...], terms: Terms) -> list[_Described]:
    """What the server says of its tools; that may be longer than what a call may say."""
    limits = msgspec.structs.replace(terms.limits, output_bytes=max(terms.limits.output_bytes, LIST_BYTES))
    request, terms = {"name": "", "arguments": {}}, msgspec.structs.replace(terms, limits=limits)

    async def ask() -> ToolResult:
        with Sandbox(Permits(1)) as sandbox:
            return await sandbox.call(argv, request, seconds=START_SECONDS, terms=terms)

    result = in_thread(ask)
    if result.outcome != "ok":
        raise UsageError(f"{command}: the MCP server gives no list of tools: {result.text} {result.stderr}".strip())
    try:
        found: list[_Described] = json.decode(result.text, list[_Described])
    except msgspec.DecodeError as error:
        raise UsageError(f"{command}: the MCP server's list of tools cannot be read: {error}") from error
    return found
