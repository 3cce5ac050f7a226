"""A worker over servers that are functions: its engine is entered once, and outlives the calls."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial

import httpx
import pytest

from agentrt.cluster import worker
from agentrt.cluster.worker import Worker
from agentrt.core.errors import UsageError
from agentrt.core.spec import RunSpec
from agentrt.engine.remote import engine as remote
from agentrt.engine.remote.server import ServerLost

SPEC = RunSpec(environment="calculator")


class _Stream(httpx.AsyncByteStream):
    def __init__(self, part: bytes) -> None:
        self._part = part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._part


def answering(asked: list[str]) -> httpx.MockTransport:
    choice = {"index": 0, "token_ids": [5], "finish_reason": "length"}
    event = {"choices": [choice | {"agentrt": {"logprobs": [0.0], "versions": [0], "finish_reason": "length"}}]}

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/v1/models":
            return httpx.Response(
                200, json={"data": [{"id": "m", "max_model_len": 100, "agentrt": {"model_hash": "h"}}]}
            )
        if request.url.path == "/metrics":
            return httpx.Response(404)
        return httpx.Response(200, stream=_Stream(b"data: " + json.dumps(event).encode() + b"\n\n"))

    return httpx.MockTransport(answer)


def test_calls_enter_the_engine_once_and_leave_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(worker, "RemoteEngine", partial(remote.RemoteEngine, transport=answering(asked)))

    async def run() -> None:
        one = Worker(SPEC, ["http://a"], "")
        first, second = await asyncio.gather(*(asyncio.create_task(one.open()) for _ in range(2)))
        assert first is second
        assert asked.count("/v1/models") == 1
        [server] = one._engine.servers
        one._engine.lose(server, ServerLost("gone"))
        await asyncio.sleep(0.3)
        assert not server.is_lost, "nobody looked for it"

    asyncio.run(run())


def test_servers_that_are_not_there_are_told_to_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    monkeypatch.setattr(worker, "RemoteEngine", partial(remote.RemoteEngine, transport=httpx.MockTransport(refuse)))

    async def run() -> None:
        one = Worker(SPEC, ["http://a"], "")
        for _ in range(2):
            with pytest.raises(UsageError, match="no server answers at http://a"):
                await one.open()

    asyncio.run(run())
