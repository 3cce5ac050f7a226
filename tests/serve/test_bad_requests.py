"""What is refused, in one sentence that names the field; and what operators ask."""

from typing import Any

import anyio
import httpx
import pytest
from standing import standing

from agentrt.core.protocol import EngineStatistics
from agentrt.serve import app
from agentrt.serve.metrics import Metrics
from agentrt.testing.engine import ScriptedEngine

pytestmark = pytest.mark.anyio
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("chat/completions", {"messages": []}, "messages is empty"),
        ("chat/completions", ASK | {"temprature": 0}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ("chat/completions", ASK | {"temperature": -1}, "temperature must be 0 or more, not -1.0"),
        ("chat/completions", ASK | {"n": 0}, "n must be 1 to 128, not 0"),
        ("chat/completions", ASK | {"logprobs": True, "top_logprobs": 129}, "top_logprobs must be 0 to 128, not 129"),
        ("completions", {"prompt": "a", "logprobs": 10**9}, "logprobs must be 0 to 128, not 1000000000"),
        ("chat/completions", ASK | {"max_tokens": "x"}, "max_tokens: Expected `int | null`, got `str`"),
        ("chat/completions", ASK | {"max_tokens": 9999}, "do not fit the context"),
        ("chat/completions", ASK | {"max_tokens": 0}, "max_tokens 0 do not fit"),
        ("chat/completions", ASK | {"max_completion_tokens": 0, "max_tokens": 5}, "max_tokens 0 do not fit"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens 0 do not fit"),
        ("chat/completions", ASK | {"response_format": {"type": "json_object"}}, "only type 'text' is served"),
        ("chat/completions", ASK | {"tool_choice": "required"}, "there are no tools"),
        (
            "chat/completions",
            ASK | {"tools": [{"function": {"name": "f"}}], "tool_choice": {"function": {"name": ["f"]}}},
            "tool_choice names ['f'], which is not among the tools",
        ),
        ("chat/completions", {"messages": [{"role": "cat", "content": ""}]}, "messages[0]: Invalid enum value 'cat'"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "has a part of type 'image_url'; only text is served",
        ),
        ("completions", {"prompt": []}, "prompt is empty"),
        ("completions", {"prompt": ["a", "b"]}, "prompt must be one text, or the ids of one"),
        ("completions", {"prompt": "a", "echo": True}, "echo is not served"),
    ],
)
async def test_what_is_refused(path: str, body: dict[str, Any], says: str) -> None:
    async with standing(ScriptedEngine([[1]])) as up, httpx.AsyncClient() as http:
        reply = await http.post(f"{up.url}/v1/{path}", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_what_is_nested_too_deeply() -> None:
    nest = "[" * 100_000 + "]" * 100_000
    body = ASK | {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": nest}}]}]}
    async with standing(ScriptedEngine([[1]])) as up, httpx.AsyncClient() as http:
        path = f"{up.url}/v1/chat/completions"
        replies = [await http.post(path, content=f'{{"user": {nest}}}'), await http.post(path, json=body)]
    assert [reply.status_code for reply in replies] == [400, 400]
    assert [reply.json()["error"]["message"] for reply in replies] == [
        "the body is not JSON: it is nested too deeply",
        "messages[0].tool_calls[0].function.arguments is not JSON: it is nested too deeply",
    ]


async def test_no_json_a_long_body_and_a_wrong_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_BYTES", 1000)
    async with standing(ScriptedEngine([[1]])) as up, httpx.AsyncClient(base_url=up.url) as http:
        assert (await http.post("/v1/chat/completions", content=b"{")).status_code == 400
        assert (await http.post("/v1/chat/completions", content=b"x" * 1001)).status_code == 413

        async def parts() -> Any:
            for _ in range(11):
                yield b"x" * 100

        assert (await http.post("/v1/chat/completions", content=parts())).status_code == 413
        assert (await http.post("/sessions/a b/v1/chat/completions", json=ASK)).status_code == 400
        assert (await http.get("/nothing")).status_code == 404


async def test_health_models_and_metrics() -> None:
    async with standing(ScriptedEngine([[1, 2]])) as up, httpx.AsyncClient(base_url=up.url) as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        [model] = (await http.get("/v1/models")).json()["data"]
        assert (model["id"], model["agentrt"]["model"], model["agentrt"]["version"]) == ("m", "scripted", 0)
        await http.post("/v1/chat/completions", json=ASK)
        await http.post("/v1/chat/completions", json={"messages": []})
        lines = (await http.get("/metrics")).text.splitlines()
    assert 'agentrt_requests_total{endpoint="chat",status="200"} 1' in lines
    assert 'agentrt_requests_total{endpoint="chat",status="400"} 1' in lines
    assert "agentrt_engine_sessions 0" in lines
    assert "# TYPE agentrt_engine_steps_total counter" in lines


def test_metrics_are_exact_and_say_what_goes_down() -> None:
    text = Metrics().text(EngineStatistics(tokens_sampled=123_456_789, pages_pinned=5), 0)
    lines = text.splitlines()
    assert "agentrt_engine_tokens_sampled_total 123456789" in lines
    assert "agentrt_engine_pages_pinned 5" in lines
    totals = {line.split()[2] for line in lines if line.startswith("# TYPE") and line.endswith("counter")}
    assert totals == {"agentrt_requests_total"} | {
        f"agentrt_engine_{name}_total"
        for name in (
            "tokens_prefilled", "tokens_reused", "tokens_sampled", "tokens_drafted", "tokens_accepted",
            "tokens_reprefilled", "steps", "preemptions", "verifications", "copies_failed",
        )
    }  # fmt: skip


async def test_a_client_that_goes_away_before_its_body_has_come_is_one() -> None:
    async with standing(ScriptedEngine([[1]])) as up:
        for path in ("/v1/chat/completions", "/sessions/s/reward"):
            async with await anyio.connect_tcp("127.0.0.1", int(up.url.rpartition(":")[2])) as sock:
                await sock.send(f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{{".encode())
                await anyio.sleep(0.05)
        for _ in range(500):
            if up.served.metrics.requests:
                break
            await anyio.sleep(0.01)
        assert dict(up.served.metrics.requests) == {("chat", 499): 1}


async def test_an_error_that_is_nobodys_is_counted_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with standing(ScriptedEngine([[1]])) as up, httpx.AsyncClient(base_url=up.url) as http:
        monkeypatch.setattr(up.served, "conversation", None)
        assert (await http.post("/v1/chat/completions", json=ASK)).status_code == 500
        assert dict(up.served.metrics.requests) == {("chat", 500): 1}
