"""MCP servers as tools: in the sandbox, one server an episode, and what a broken one leads to."""

from pathlib import Path

import anyio
import pytest

from agentrt import tool
from agentrt.core.errors import UsageError
from agentrt.env.mcp import mcp_tools
from agentrt.env.tool import Tool
from agentrt.sandbox.reply import Progress
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import Sandbox

PLAIN = """
import json, sys
calls = 0
def say(message): print(json.dumps({"jsonrpc": "2.0"} | message), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if "method" not in message: continue
    number, params = message.get("id"), message.get("params", {})
    if message["method"] == "initialize":
        say({"id": number, "result": {"protocolVersion": params["protocolVersion"], "capabilities": {}}})
    elif message["method"] == "tools/list":
        page = params.get("cursor", "count")
        tools = [{"name": page, "inputSchema": {"type": "object"}}]
        say({"id": number, "result": {"tools": tools} | ({"nextCursor": "fail"} if page == "count" else {})})
    elif params.get("name") == "count":
        calls += 1
        say({"id": 99, "method": "ping"})
        say({"id": 98, "method": "roots/list"})
        token = params["_meta"]["progressToken"]
        say({"method": "notifications/progress", "params": {"progressToken": token, "progress": 1, "total": 4}})
        say({"id": number, "result": {"content": [{"type": "text", "text": str(calls)}, {"type": "image"}]}})
    elif params.get("name") == "fail":
        say({"id": number, "error": {"code": -32000, "message": "no"}})
"""


def run(*calls: Tool, arguments: dict[str, object] | None = None) -> tuple[list[ToolResult], list[Progress]]:
    heard: list[Progress] = []

    async def main() -> list[ToolResult]:
        with Sandbox(anyio.CapacityLimiter(1)) as sandbox:
            return [
                await sandbox.call(each.argv, arguments or {}, seconds=30, terms=each.terms, on_progress=heard.append)
                for each in calls
            ]

    return anyio.run(main), heard


def server(folder: Path, text: str) -> str:
    (folder / "server.py").write_text(text)
    return f"python {folder}/server.py"


def test_the_tools_of_a_server_share_it_and_its_state(tmp_path: Path) -> None:
    count, fail = mcp_tools(server(tmp_path, PLAIN))
    assert (count.name, fail.name, count.parameters) == ("count", "fail", {"type": "object"})
    results, heard = run(count, fail, count)
    assert [(result.outcome, result.text) for result in results] == [
        ("ok", "1\n[image]"), ("tool_error", "no"), ("ok", "2\n[image]"),
    ]  # fmt: skip
    assert heard == [Progress(0.25), Progress(0.25)]


def test_one_of_several_is_not_the_tool(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the server has 2 tools \(count, fail\); take them with `mcp_tools`"):
        tool(f"mcp:{server(tmp_path, PLAIN)}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit('broken')", "the server has ended"),
        ("print('hello')", "MCP: "),
        ("1 / 0", "ZeroDivision"),
    ],
)
def test_a_broken_server_is_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        mcp_tools(server(tmp_path, text))


def test_a_server_of_the_mcp_package(tmp_path: Path) -> None:
    pytest.importorskip("mcp.server.mcpserver")
    text = '''
from mcp.server.mcpserver import MCPServer
server = MCPServer("adder")
@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
server.run()
'''
    add = tool(f"mcp:{server(tmp_path, text)}")
    assert (add.name, add.description, add.parameters["required"]) == ("add", "Add two numbers.", ["a", "b"])
    (result,), _ = run(add, arguments={"a": 2, "b": 3})
    assert (result.outcome, result.text) == ("ok", "5")
