"""MCP servers as tools: in the sandbox, one server an episode, and what a broken one leads to."""

from pathlib import Path

import anyio
import pytest

from agentrt import tool
from agentrt.core.errors import UsageError
from agentrt.env import mcp
from agentrt.env.mcp import mcp_tools
from agentrt.env.tool import Tool
from agentrt.sandbox.permits import Permits
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
        say({"id": number, "result": {"protocolVersion": params["protocolVersion"], "capabilities": {},
            "serverInfo": {"name": "plain", "version": "1"}}})
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
        image = {"type": "image", "data": "", "mimeType": "image/png"}
        say({"id": number, "result": {"content": [{"type": "text", "text": str(calls)}, image]}})
    elif params.get("name") == "fail":
        say({"id": number, "error": {"code": -32000, "message": "no"}})
"""


def run(*calls: Tool, arguments: dict[str, object] | None = None) -> tuple[list[ToolResult], list[Progress]]:
    heard: list[Progress] = []

    async def main() -> list[ToolResult]:
        with Sandbox(Permits(1)) as sandbox:
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


def test_a_long_list_of_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than what a call may say to a model."""
    long = server(tmp_path, PLAIN.replace('"inputSchema":', '"description": "d" * 100_000, "inputSchema":'))
    assert [len(each.description) for each in mcp_tools(long)] == [100_000, 100_000]
    monkeypatch.setattr(mcp, "LIST_BYTES", 70_000)
    with pytest.raises(UsageError, match="the MCP server gives no list of tools: it is longer than 70000 bytes"):
        mcp_tools(long)


def test_a_list_of_tools_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "LIST_BYTES", 1_000_000)
    text = PLAIN.replace('"cursor", "count")', '"cursor", "d" * 300_000)')
    endless = server(
        tmp_path, text.replace('({"nextCursor": "fail"} if page == "count" else {})', '{"nextCursor": page}')
    )
    with pytest.raises(UsageError, match="the MCP server gives no list of tools: it is longer than 1000000 bytes"):
        mcp_tools(endless)


def test_one_of_several_is_not_the_tool(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the server has 2 tools \(count, fail\); take them with `mcp_tools`"):
        tool(f"mcp:{server(tmp_path, PLAIN)}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit('broken')", "the server has ended"),
        ("print('hello')", "the server has ended"),
        ("print('x' * 2_000_000)\nwhile True: pass", "the server's message has more than 1048576 bytes"),
        ("print('[' * 100_000)", "the server has ended"),
        ("1 / 0", "ZeroDivision"),
    ],
)
def test_a_broken_server_is_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        mcp_tools(server(tmp_path, text))


def test_a_server_of_the_mcp_package(tmp_path: Path) -> None:
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


def test_noise_and_floods_of_a_server_harm_nobody_else(tmp_path: Path) -> None:
    flood = """
import threading
def flood():
    while True: say({"method": "notifications/progress", "params": {"progressToken": 1, "progress": float("nan")}})
threading.Thread(target=flood, daemon=True).start()
print("noise")
"""
    count, _ = mcp_tools(server(tmp_path, PLAIN.replace("for line in sys.stdin", flood + "for line in sys.stdin", 1)))
    results, heard = run(count, count)
    assert [result.text for result in results] == ["1\n[image]", "2\n[image]"]
    assert set(heard) <= {Progress(0.25)}


def test_a_call_of_a_server_that_hangs_ends_with_its_time(tmp_path: Path) -> None:
    text = PLAIN.replace(
        'elif params.get("name") == "fail":', 'elif params.get("name") == "fail": continue\n    elif 0:'
    )
    count, fail = mcp_tools(server(tmp_path, text))

    async def main() -> list[ToolResult]:
        with Sandbox(Permits(1)) as sandbox:
            return [
                await sandbox.call(each.argv, {}, seconds=seconds, terms=each.terms)
                for each, seconds in ((count, 20), (fail, 0.3), (count, 20))
            ]

    results = anyio.run(main)
    assert [(result.outcome, result.text[:1]) for result in results] == [("ok", "1"), ("timeout", ""), ("ok", "1")]
