"""MCP bridge: a worker that starts an MCP server on its own pipes and passes calls on to it.

Run as `python -I -S mcp_bridge.py PACKAGES COMMAND...`. Each line on standard input is a call, `{"name": "add",
"arguments": {"a": 1}}`, and gets one line on the file descriptor in AGENTRT_REPLY_FD: `{"result": "..."}` or `{"error":
"..."}`, before it what the server says of its progress. A call without a name gets the list of tools. PACKAGES are
folders of Python packages for the server, joined by a colon. Server and bridge are in one sandbox and end together.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

PROTOCOL = "2025-06-18"
METHOD_NOT_FOUND = -32601


class ServerError(RuntimeError):
    """The server answered with an error."""


class Session:
    """JSON-RPC over a server's standard input and output, one line a message."""

    def __init__(
        self, to_server: IO[bytes], from_server: IO[bytes], on_progress: Callable[[dict[str, Any]], None]
    ) -> None:
        self._to_server, self._from_server, self._on_progress = to_server, from_server, on_progress
        self._last_id = 0

    def open(self) -> None:
        """Shake hands."""
        about = {"name": "agentrt", "version": "0"}
        self.request("initialize", {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": about})
        self._send({"method": "notifications/initialized"})

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request and give its result; meanwhile answer what the server asks. Raises `ServerError`, `EOFError`."""
        self._last_id += 1
        token = {"_meta": {"progressToken": self._last_id}} if method == "tools/call" else {}
        self._send({"id": self._last_id, "method": method, "params": params | token})
        while True:
            message = self._receive()
            if "method" in message:
                self._answer(message)
            elif message.get("id") == self._last_id:
                if "error" in message:
                    raise ServerError(str(message["error"].get("message", "the server gave no reason")))
                result: dict[str, Any] = message["result"]
                return result

    def tools(self) -> list[dict[str, Any]]:
        """Every tool, over all pages."""
        found, params = list[dict[str, Any]](), dict[str, Any]()
        while True:
            page = self.request("tools/list", params)
            found += page["tools"]
            if not page.get("nextCursor"):
                return found
            params = {"cursor": page["nextCursor"]}

    def _answer(self, message: dict[str, Any]) -> None:
        if message["method"] == "notifications/progress":
            self._on_progress(message.get("params", {}))
        elif message["method"] == "ping":
            self._send({"id": message["id"], "result": {}})
        elif "id" in message:
            self._send({"id": message["id"], "error": {"code": METHOD_NOT_FOUND, "message": "not offered"}})

    def _send(self, message: dict[str, Any]) -> None:
        self._to_server.write(json.dumps({"jsonrpc": "2.0"} | message).encode() + b"\n")
        self._to_server.flush()

    def _receive(self) -> dict[str, Any]:
        line = self._from_server.readline()
        if not line:
            raise EOFError("the server has ended")
        message: dict[str, Any] = json.loads(line)
        return message


def call(session: Session, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """One call as a reply of ours."""
    try:
        if not name:
            return {"result": session.tools()}
        result = session.request("tools/call", {"name": name, "arguments": arguments})
    except ServerError as error:
        return {"error": str(error)}
    text = "\n".join(part.get("text", f"[{part.get('type')}]") for part in result.get("content", []))
    return {"error" if result.get("isError") else "result": text}


def main() -> None:
    """Start the server, answer calls until standard input ends."""
    reply = os.dup(int(os.environ.get("AGENTRT_REPLY_FD", "1")))

    def say(line: dict[str, Any]) -> None:
        os.write(reply, json.dumps(line).encode() + b"\n")

    def progress(params: dict[str, Any]) -> None:
        done, total = params.get("progress"), params.get("total")
        if isinstance(done, int | float) and isinstance(total, int | float) and total > 0:
            say({"progress": done / total})

    environment = {**os.environ, "PYTHONPATH": sys.argv[1]}
    server = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert server.stdin is not None
    assert server.stdout is not None
    session = Session(server.stdin, server.stdout, progress)
    try:
        session.open()
        for line in sys.stdin:
            asked = json.loads(line)
            say(call(session, asked["name"], asked["arguments"]))
    except (EOFError, BrokenPipeError, ValueError) as error:
        sys.exit(f"MCP: {error}")


if __name__ == "__main__":
    main()
