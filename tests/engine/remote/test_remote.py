"""Sessions over servers, against servers that are functions: every wire fact is here as the servers send it."""

import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from anyio.abc import SocketAttribute, SocketStream

from agentrt.core.errors import EngineFailure, InvalidToken, RequestError, UsageError
from agentrt.core.spec import SamplingParams
from agentrt.engine.remote import engine as remote
from agentrt.engine.remote import server as remote_server
from agentrt.engine.remote.engine import RemoteEngine, RemoteSession
from agentrt.engine.remote.wire import to_version
from agentrt.testing.tokenizer import byte_tokenizer

pytestmark = pytest.mark.anyio
PARAMS = SamplingParams(stop_token_ids=(257,))
Event = dict[str, Any]


class Fake:
    """A server that gives `ids` one a piece; `breaks` after so many of a request, once."""

    def __init__(
        self,
        kind: str,
        ids: Callable[[list[int]], list[int]],
        *,
        raw: float | None = None,
        version: int = 0,
        breaks: int = -1,
    ) -> None:
        self.kind, self.ids, self.raw, self.version, self.breaks = kind, ids, raw, version, breaks
        self.is_down = False
        self.busy = 0
        self.asked: list[Event] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("refused", request=request)
        path = request.url.path
        if path == "/v1/models":
            owner = {"sglang": "sglang", "vllm": "vllm"}.get(self.kind, "someone")
            model: Event = {"id": "m", "owned_by": owner, "max_model_len": 1000}
            return httpx.Response(
                200,
                json={
                    "data": [model | ({"agentrt": {"version": 0, "kv_tokens": 640}} if self.kind == "agentrt" else {})]
                },
            )
        if path == "/get_model_info":
            return httpx.Response(200, json={"weight_version": str(self.version), "model_path": "m"})
        if path == "/get_server_info":
            return httpx.Response(200, json={"max_total_num_tokens": 20_480, "max_req_input_len": 20_474})
        if path == "/metrics":
            config = (
                'vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="40",sliding_window="None"} 1.0\n'
            )
            started = f"process_start_time_seconds {17 + self.version}\n"
            return httpx.Response(200, text=(config if self.kind == "vllm" else "") + started)
        body = json.loads(request.content)
        if self.busy:
            self.busy -= 1
            return httpx.Response(503, json={"error": "paused"})
        prompt = body.get("prompt") or body["input_ids"]
        sampling = body.get("sampling_params", body)
        is_probe = sampling.get("top_k") == 1
        if not is_probe:
            self.asked.append(body)
        limit = sampling.get("max_new_tokens") or body["max_tokens"]
        ids = [5] if is_probe else self.ids(prompt)[:limit]
        logprob = (self.raw if self.raw is not None else 0.0) if is_probe else -0.25
        return httpx.Response(200, stream=_Stream(self._lines(prompt, ids, limit, logprob, is_probe)))

    def _lines(self, prompt: list[int], ids: list[int], limit: int, logprob: float, is_probe: bool) -> Iterable[bytes]:
        form = {"sglang": self._sglang, "text": self._text}.get(self.kind, self._openai)
        for count in range(1, len(ids) + 1):
            if count - 1 == self.breaks and not is_probe:
                self.breaks, self.is_down = -1, True
                raise httpx.ReadError("broken off")
            end = "length" if count == limit else "stop" if count == len(ids) else None
            yield b"data: " + json.dumps(form(prompt, ids[:count], logprob, end)).encode() + b"\n\n"
        if self.kind in ("vllm", "openai"):
            yield b'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}\n\n'
        yield b"data: [DONE]\n\n"

    def _openai(self, prompt: list[int], ids: list[int], logprob: float, end: str | None) -> Event:
        about = {"logprobs": [logprob], "versions": [self.version]}
        choice: Event = {"index": 0, "text": "x", "token_ids": ids[-1:], "finish_reason": end, "stop_reason": None}
        if self.kind == "agentrt":
            return {
                "choices": [choice | {"agentrt": about | ({"finish_reason": end, "cached_tokens": 3} if end else {})}]
            }
        return {"choices": [choice | {"logprobs": {"token_logprobs": [logprob]}}]}

    def _sglang(self, prompt: list[int], ids: list[int], logprob: float, end: str | None) -> Event:
        entries = [[logprob, one, None] for one in ids]
        reason = {"type": end, "matched": 257} if end else None
        return {
            "text": "x",
            "meta_info": {
                "output_token_logprobs": entries, "finish_reason": reason,
                "weight_version": str(self.version), "cached_tokens": 3,
            },
        }  # fmt: skip

    def _text(self, prompt: list[int], ids: list[int], logprob: float, end: str | None) -> Event:
        return {"choices": [{"index": 0, "text": "x", "finish_reason": end}]}


class _Stream(httpx.AsyncByteStream):
    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for line in self._lines:
            yield line


@asynccontextmanager
async def over(*servers: Fake) -> AsyncIterator[RemoteEngine]:
    names = {f"s{index}": server for index, server in enumerate(servers)}
    transport = httpx.MockTransport(lambda request: names[request.url.host].answer(request))
    async with RemoteEngine([f"http://{name}" for name in names], byte_tokenizer(), transport=transport) as engine:
        yield engine


def ends_at_20(prompt: list[int]) -> list[int]:
    """Ids that say their own position, up to an end id as the 20th of all."""
    return [*range(len(prompt), 19), 257]


@asynccontextmanager
async def one_lost() -> AsyncIterator[tuple[RemoteEngine, Fake]]:
    """An engine over two servers, and the first of them, which broke off in the middle of a turn and is down."""
    first, second = Fake("vllm", ends_at_20, breaks=5), Fake("vllm", ends_at_20)
    async with over(first, second) as engine:
        with engine.session(seed=0) as session:
            await session.sample([1, 2, 3, 4], PARAMS, max_tokens=50)
        assert engine.servers[0].is_lost
        yield engine, first


@pytest.mark.parametrize("kind", ["agentrt", "vllm", "sglang"])
async def test_ids_logprobs_versions_and_cached_tokens_as_the_server_says(kind: str) -> None:
    async with over(Fake(kind, ends_at_20, version=4)) as engine:
        assert engine.info.logprobs_of == "sampled_distribution"
        engine.servers[0].version = 4  # what its owner published; vLLM does not say
        with engine.session(seed=1) as session:
            done = await session.sample([1, 2, 3, 4], PARAMS, max_tokens=50)
    assert done.token_ids.tolist() == [*range(4, 19), 257]
    assert done.logprobs.tolist() == [-0.25] * 16
    assert done.versions.tolist() == [4] * 16
    assert (done.finish_reason, done.matched_stop, done.cached_tokens) == ("stop", 257, 3)
    assert session.tokens.token_ids.tolist() == [1, 2, 3, 4, *done.token_ids]
    assert kind in engine.lines[0]
    assert engine.servers[0].belief.room == {"agentrt": 640, "vllm": 128 * 40, "sglang": 20_480}[kind]
    assert engine.num_sessions == 0


async def test_a_conversation_waits_for_room_the_oldest_first() -> None:
    """Room for 640 ids, 512 of them given away: of three conversations of 300, one is there at a time."""
    server, ended = Fake("agentrt", lambda prompt: [1] * 4), []

    async def play(engine: RemoteEngine, session: RemoteSession, begun: anyio.Event) -> None:
        with session:
            await session.sample([session.seed] * 300, PARAMS, max_tokens=4)
            begun.set()
            await anyio.sleep(0.02)
            await session.sample([7], PARAMS, max_tokens=4)
            ended.append((session.seed, engine.statistics().waiting))

    async with over(server) as engine, anyio.create_task_group() as group:
        sessions, begun = [engine.session(seed=seed) for seed in range(3)], anyio.Event()
        group.start_soon(play, engine, sessions[1], begun)
        await begun.wait()
        group.start_soon(play, engine, sessions[2], begun)
        group.start_soon(play, engine, sessions[0], begun)
    assert ended == [(1, 2), (0, 1), (2, 0)]
    assert [body["prompt"][0] for body in server.asked] == [1, 1, 0, 0, 2, 2]


async def test_a_lost_server_costs_no_id_and_no_episode() -> None:
    """The rest has a seed of its own: a server that keys noise by the place in its reply would use the same noise twice."""
    first, second = Fake("vllm", ends_at_20, breaks=5), Fake("vllm", ends_at_20)
    async with over(first, second) as engine:
        with engine.session(seed=0) as session:
            done = await session.sample([1, 2, 3, 4], PARAMS, max_tokens=50)
            again = await session.sample([9], PARAMS, max_tokens=1)
    assert done.token_ids.tolist() == [*range(4, 19), 257]
    [part], [rest, after] = first.asked, second.asked
    assert (part["max_tokens"], rest["max_tokens"]) == (50, 45)
    assert rest["prompt"] == [1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert len({part["seed"], rest["seed"], after["seed"]}) == 3
    assert part["seed"] == done.seed
    assert again.context_tokens == 21


async def test_c44_a_turn_that_was_aborted_goes_on_with_what_is_left_of_its_budget() -> None:
    def in_parts(prompt: list[int]) -> list[int]:
        return {10: [1] * 9, 19: [2] * 6}.get(len(prompt), [3] * 30)

    server = Fake("vllm", in_parts)
    original = server._openai
    server._openai = lambda *args: _aborted(original(*args))  # type: ignore[method-assign]
    async with over(server) as engine:
        with engine.session() as session:
            done = await session.sample([7] * 10, SamplingParams(), max_tokens=24)
    assert [body["max_tokens"] for body in server.asked] == [24, 15, 9]
    assert done.token_ids.tolist() == [1] * 9 + [2] * 6 + [3] * 9
    assert done.finish_reason == "length"


def _aborted(event: Event) -> Event:
    choice = event["choices"][0]
    return {
        "choices": [
            choice | {"finish_reason": "abort" if choice["finish_reason"] == "stop" else choice["finish_reason"]}
        ]
    }


async def test_c03_text_without_ids_is_refused_by_the_name_of_the_field() -> None:
    with pytest.raises(UsageError, match=r"no choices\[0\].token_ids"):
        async with over(Fake("text", ends_at_20)):
            pass


async def test_c26_raw_logprobs_are_taken_at_temperature_1_only() -> None:
    async with over(Fake("vllm", ends_at_20, raw=-1.5)) as engine:
        assert engine.info.logprobs_of == "raw"
        with engine.session() as session:
            with pytest.raises(RequestError, match="with temperature, top_k are not those of the law"):
                await session.sample([1], SamplingParams(temperature=0.5, top_k=5), max_tokens=4)
            assert len(session.tokens) == 0
            assert len((await session.sample([1], SamplingParams(), max_tokens=4)).token_ids) == 4


async def test_c30_an_id_that_the_tokenizer_does_not_know_ends_this_episode_alone() -> None:
    async with over(Fake("sglang", lambda prompt: [1, 99_999, 2])) as engine:
        with engine.session() as session, engine.session() as sibling:
            with pytest.raises(InvalidToken, match="sampled id 99999, and the tokenizer's ids end at"):
                await session.sample([1], PARAMS, max_tokens=3)
            assert session.tokens.token_ids.tolist() == [1, 1]
            with pytest.raises(InvalidToken):
                await sibling.sample([1], PARAMS, max_tokens=3)


async def test_c45_a_server_that_is_paused_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_server, "BUSY_SECONDS", 0.01)
    server = Fake("vllm", ends_at_20)
    async with over(server) as engine:
        server.busy = 3
        with engine.session() as session:
            assert len((await session.sample([1, 2], PARAMS, max_tokens=50)).token_ids) == 18
    assert server.busy == 0


async def test_a_server_that_comes_back_with_old_weights_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(remote, "LOST_SECONDS", 0.5)
    server = Fake("sglang", ends_at_20, version=3)
    async with over(server) as engine:
        engine.oldest_version = 3
        with engine.session() as session:
            await session.sample([1, 2], PARAMS, max_tokens=4)
            server.is_down = True
            with pytest.raises(EngineFailure, match=r"no server came back within 0\.5 s"):
                await session.sample([1], PARAMS, max_tokens=4)
            server.is_down, server.version = False, 0
            with pytest.raises(EngineFailure, match=r"no server has weights of version 3 or newer: http://s0 has 0"):
                await session.sample([1], PARAMS, max_tokens=4)
            server.version = engine.servers[0].version = 3
            assert (await session.sample([1], PARAMS, max_tokens=4)).versions.tolist() == [3] * 4


async def test_a_refusal_is_not_tried_again() -> None:
    server = Fake("vllm", ends_at_20)
    async with over(server) as engine:
        server.answer = lambda request: httpx.Response(400, json={"error": {"message": "prompt too long"}})  # type: ignore[method-assign]
        with engine.session() as session, pytest.raises(RequestError, match="http://s0 answers 400: prompt too long"):
            await session.sample([1], PARAMS, max_tokens=4)


async def test_no_server_no_run() -> None:
    server = Fake("vllm", ends_at_20)
    server.is_down = True
    with pytest.raises(UsageError, match="no server answers at http://s0"):
        async with over(server):
            pass


async def test_a_lost_server_is_asked_again_though_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was looked for only when none was left: one that was away for a moment got no turn for the rest of the run."""
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.01)
    async with one_lost() as (engine, first):
        first.is_down = False
        await anyio.sleep(0.5)
        assert not engine.servers[0].is_lost


@pytest.mark.parametrize("status", [404, 502, 503])
async def test_a_server_that_is_not_ready_yet_is_not_back(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway answers for a server that starts. It was a usage error, in the middle of an episode."""
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.01)
    server = Fake("vllm", ends_at_20, breaks=3)
    original, starting = server.answer, 5

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal starting
        if server.is_down:
            starting -= 1
            server.is_down = starting > 0
            return httpx.Response(status, text="<html>no upstream</html>")
        return original(request)

    server.answer = answer  # type: ignore[method-assign]
    async with over(server) as engine:
        with engine.session() as session:
            done = await session.sample([1, 2, 3, 4], PARAMS, max_tokens=50)
    assert done.token_ids.tolist() == [*range(4, 19), 257]
    assert starting == 0


async def test_a_gateway_without_its_server_is_a_lost_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.01)
    first, second = Fake("vllm", ends_at_20), Fake("vllm", ends_at_20)
    async with over(first, second) as engine:
        first.answer = lambda request: httpx.Response(502, text="bad gateway")  # type: ignore[method-assign]
        with engine.session(seed=0) as session:
            assert len((await session.sample([1, 2, 3, 4], PARAMS, max_tokens=50)).token_ids) == 16
        assert [server.is_lost for server in engine.servers] == [True, False]


async def test_another_model_at_a_lost_address_is_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ids are another vocabulary's."""
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.01)
    async with one_lost() as (engine, first):
        first.raw, first.is_down = -1.5, False
        await anyio.sleep(0.2)
        assert engine.servers[0].is_lost
        assert "logprobs of sampled_distribution" in engine.servers[0].capabilities.line("")
        first.raw = None
        await anyio.sleep(0.5)
        assert not engine.servers[0].is_lost


async def test_all_who_wait_for_a_server_have_it_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.1)
    server, probes = Fake("vllm", ends_at_20), 0
    original = server.answer

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal probes
        probes += request.url.path == "/v1/models"
        return original(request)

    async def play(engine: RemoteEngine) -> None:
        with engine.session() as session:
            await session.sample([1, 2], PARAMS, max_tokens=4)

    server.answer = answer  # type: ignore[method-assign]
    async with over(server) as engine:
        server.is_down, probes = True, 0
        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(play, engine)
            await anyio.sleep(0.35)
            assert probes <= 4
            server.is_down = False


async def test_a_server_that_gives_nothing_again_and_again_fails_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked again at once, for ever."""
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.001)
    server = Fake("vllm", lambda prompt: [])
    async with over(server) as engine:
        with (
            engine.session() as session,
            pytest.raises(EngineFailure, match="10 requests in a row for a turn gave no id"),
        ):
            await session.sample([1], PARAMS, max_tokens=4)
    assert len(server.asked) == 10


CHOICE = {"index": 0, "token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": None}


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ([], "no JSON object"),
        ("{", "no JSON object"),
        ({"choices": 3}, "another form"),
        ({"choices": [3]}, "another form"),
        ({"choices": [CHOICE | {"token_ids": ["5"]}]}, "another form: Expected `int`, got `str`"),
        ({"choices": [CHOICE | {"token_ids": [-1]}]}, "another form: Expected `int` >= 0"),
        ({"choices": [CHOICE | {"token_ids": [2**40]}]}, "another form: Expected `int` <= 2147483647"),
        (
            {"choices": [CHOICE | {"logprobs": {"token_logprobs": [None]}}]},
            "another form: Expected `float`, got `null`",
        ),
        ({"choices": [CHOICE | {"logprobs": {"token_logprobs": []}}]}, "gave 1 ids and 0 logprobs"),
        ({"choices": [CHOICE | {"agentrt": {"logprobs": [-0.5], "versions": []}}]}, "gave 1 ids and 0 versions"),
        (
            {"choices": [CHOICE | {"agentrt": {"logprobs": [-0.5], "versions": [-1]}}]},
            "another form: Expected `int` >= 0",
        ),
        ({"choices": [CHOICE | {"agentrt": 3}]}, "another form"),
        ({"choices": [CHOICE | {"finish_reason": "error"}]}, "ended a turn by 'error', which is neither"),
        ({"error": {"message": "out of memory"}}, "the server failed: out of memory"),
    ],
)
async def test_a_reply_that_is_wrong_fails_the_turn_and_no_more(event: Any, words: str) -> None:
    """Some were bugs, which end a run; a turn that ended by an error counted as whole."""
    server = Fake("vllm", ends_at_20)
    async with over(server) as engine:
        line = b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n"
        server.answer = lambda request: httpx.Response(200, stream=_Stream([line]))  # type: ignore[method-assign]
        with engine.session() as session:
            with pytest.raises(EngineFailure, match=words):
                await session.sample([1], PARAMS, max_tokens=4)
            assert session.tokens.token_ids.tolist() == [1]


@pytest.mark.parametrize(
    "listed", [b"[]", b"{", b'{"data": 3}', b'{"data": [{"id": 3}]}', b'{"data": [{"max_model_len": "x"}]}']
)
async def test_a_server_that_says_nonsense_of_itself_is_refused(listed: bytes) -> None:
    server = Fake("vllm", ends_at_20)
    server.answer = lambda request: httpx.Response(200, content=listed)  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"http://s0/v1/models answers 200 in a form of its own"):
        async with over(server):
            pass


async def test_an_event_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_server, "EVENT_BYTES", 1000)
    server = Fake("vllm", ends_at_20)
    async with over(server) as engine:
        server.answer = lambda request: httpx.Response(200, stream=_Stream([b"x" * 600] * 1000))  # type: ignore[method-assign]
        with engine.session() as session, pytest.raises(EngineFailure, match="an event of more than 1000 bytes"):
            await session.sample([1], PARAMS, max_tokens=4)


async def test_what_progress_raises_is_its_callers_error() -> None:
    def fail() -> None:
        raise LookupError("a display that is gone")

    async with over(Fake("vllm", ends_at_20)) as engine:
        with engine.session() as session:
            with pytest.raises(LookupError, match="a display that is gone"):
                await session.sample([1, 2], PARAMS, max_tokens=50, progress=fail)
            assert len((await session.sample([1], PARAMS, max_tokens=1)).token_ids) == 1


async def test_connections_are_kept_alive_by_the_system() -> None:
    """A machine that loses its power sends no end: a turn there waited for ever."""

    async def serve(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    engine = RemoteEngine(["http://nowhere"], byte_tokenizer())
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        port = listener.extra(SocketAttribute.local_port)
        async with engine._http.stream("GET", f"http://127.0.0.1:{port}/") as reply:
            connection = reply.extensions["network_stream"].get_extra_info("socket")
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            if hasattr(socket, "TCP_KEEPIDLE"):
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        await engine._http.aclose()
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("word", "version"),
    [("default", 0), ("v7", 7), (12, 12), ("2147483647", 2**31 - 1), ("20261201093000", None), ("²", None), ("9" * 5000, None)],
)  # fmt: skip
def test_a_word_for_weights_that_is_no_version(word: str | int, version: int | None) -> None:
    assert to_version(word) == version
