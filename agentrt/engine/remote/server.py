"""`Server`: one server as its client knows it: what it can do, whether it is there, which weights it has."""

import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import anyio
import httpx
import msgspec

from agentrt.core.errors import EngineFailure, RequestError, UsageError, WeightsError
from agentrt.core.protocol import UpdateMode, UpdateReport
from agentrt.core.spec import SamplingParams
from agentrt.engine.remote.router import Belief
from agentrt.engine.remote.wire import Asked, Dialect, LawOf, OpenAI, Piece, SGLang, read_event, to_version

CONNECT_SECONDS = 10.0
BUSY_SECONDS = 0.5
"""Between two tries at a server that says it is busy (429, 503), as in a pause."""
PROBE = 1
"""An id that every model has."""

Kind = Literal["agentrt", "vllm", "sglang", "openai"]


class ServerLost(Exception):
    """The server cannot be reached, or broke off. Another one may go on."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of a server when it was asked."""

    kind: Kind
    model: str
    context_length: int
    logprobs_of: LawOf
    says_version: bool
    says_cached: bool
    model_hash: str = ""
    """Empty if it does not say."""
    room: float = math.inf
    """Ids whose KV it can hold, if it says so."""
    updates: tuple[str, ...] = ()
    """Calls that it has for new weights."""

    def line(self, url: str) -> str:
        """For people."""
        room = f"room for {self.room:.0f} ids" if math.isfinite(self.room) else "room not said"
        return (
            f"{url}: {self.kind}, {self.model}, context {self.context_length}, logprobs of {self.logprobs_of}, versions "
            f"{'by the server' if self.says_version else 'by this client'}, cached tokens "
            f"{'reported' if self.says_cached else 'unknown'}, {room}, updates: {', '.join(self.updates) or 'none'}"
        )


class Server:
    """Borrows the HTTP client."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url, self._http = url.rstrip("/").removesuffix("/v1"), http
        self.capabilities: Capabilities
        self.dialect: Dialect
        self.belief = Belief()
        self.is_lost = False
        self.version = 0
        """Of its weights, as far as is known."""
        self._started: float | None = None

    def __repr__(self) -> str:
        return f"<Server {self.url}, {'lost' if self.is_lost else 'there'}, version {self.version}>"

    async def probe(self) -> None:
        """Ask what it is and what it can do. `UsageError` if it cannot be used, `ServerLost` if it is not there."""
        listed = await self._get("/v1/models")
        model = (listed.get("data") or [{}])[0]
        kind, name = _kind(model), str(model.get("id", ""))
        self.dialect = SGLang() if kind == "sglang" else OpenAI(name, is_ours=kind == "agentrt")
        own = model.get("agentrt") or {}
        says_version, context = kind == "agentrt", int(model.get("max_model_len") or 0)
        metrics = await self._metrics()
        room = own.get("kv_tokens") or _room_of_vllm(metrics)
        if kind == "sglang":
            info = await self._get("/get_model_info")
            version = to_version(info.get("weight_version"))
            says_version, context = version is not None, context or int(info.get("context_length") or 4096)
            self.version = version or 0
            room = (await self._get("/get_server_info")).get("max_total_num_tokens")
        elif kind == "agentrt":
            self.version = int(own.get("version", 0))
        law, says_cached = await self._probe_law()
        self.capabilities = Capabilities(
            kind=kind, model=name, context_length=context or 4096, logprobs_of=own.get("logprobs_of", law),
            says_version=says_version, says_cached=says_cached,
            model_hash=own.get("model_hash", ""), room=room or math.inf,
            updates=("weights",) if own.get("takes_weights") else UPDATES[kind],
        )  # fmt: skip
        self.belief.room = self.capabilities.room
        self._started = _start_time(metrics)
        self.is_lost = False

    async def returns(self) -> bool:
        """Ask a lost server again. If it was restarted, what it held is forgotten and its version is read anew."""
        before, version = self._started, self.version
        try:
            await self.probe()
        except ServerLost:
            return False
        if self._started != before or self._started is None:
            self.belief.flush()
            if not self.capabilities.says_version:
                self.version = 0  # what it started with; who publishes weights says when it has others
        if self.version != version:
            self.belief.flush()
        return True

    async def generate(self, asked: Asked, take: Callable[[Piece], None]) -> None:
        """Give `take` the pieces of a turn as they come; what it raises ends the request.

        `RequestError` for what the server refuses, `ServerLost` if it breaks off.
        """
        body = self.dialect.body(asked)
        try:
            while True:
                async with self._http.stream("POST", self.url + self.dialect.path, json=body) as reply:
                    if reply.status_code == 200:
                        await self._read(reply, take)
                        return
                    if reply.status_code not in (429, 503):
                        await reply.aread()
                        raise _refusal(self.url, reply)
                await anyio.sleep(BUSY_SECONDS)
        except httpx.TransportError as error:
            raise ServerLost(f"{self.url}: {type(error).__name__} {error}") from error

    async def update_weights(self, version: int, source: Mapping[str, Any], mode: UpdateMode) -> UpdateReport:
        """Have it take weights: `source` is the part of the body that says which. `WeightsError` if it does not."""
        try:
            reply = await self._http.post(f"{self.url}/weights", json={"version": version, "mode": mode, **source})
        except httpx.TransportError as error:
            raise WeightsError(f"{self.url}: {type(error).__name__} {error}") from error
        if reply.status_code != 200:
            raise WeightsError(str(_refusal(self.url, reply)))
        self.version = version
        self.belief.flush()
        return msgspec.json.decode(reply.content, type=UpdateReport)

    async def _read(self, reply: httpx.Response, take: Callable[[Piece], None]) -> None:
        parts, rest, so_far = reply.aiter_raw(), b"", 0
        try:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    event = read_event(line.decode().rstrip("\r"))
                    piece = self.dialect.piece(event, so_far) if event is not None else None
                    if piece is not None:
                        so_far += len(piece.token_ids)
                        take(piece)
        except EngineFailure:
            await _abandon(reply, parts)
            raise

    async def _probe_law(self) -> tuple[LawOf, bool]:
        """Of which distribution the logprobs are: under top_k 1 the sampled one is 0, and T moves all but the raw ones."""
        found = []
        for params in (SamplingParams(top_k=1), SamplingParams(top_k=1, temperature=2.0)):
            pieces: list[Piece] = []
            await self.generate(Asked([PROBE] * 4, params, 1, 0, 0, 0), pieces.append)
            logprobs = [value for piece in pieces for value in piece.logprobs]
            if not logprobs:
                raise UsageError(f"{self.url}: the server sampled nothing when it was tried, so it cannot be used")
            found.append(logprobs[0])
        says_cached = any(piece.cached_tokens is not None for piece in pieces)
        if max(map(abs, found)) < 1e-6:
            return "sampled_distribution", says_cached
        return ("raw" if abs(found[0] - found[1]) < 1e-6 else "temperature_only"), says_cached

    async def _metrics(self) -> list[str]:
        """Its metrics, in lines; none if it has none."""
        try:
            reply = await self._http.get(self.url + "/metrics")
        except httpx.TransportError as error:
            raise ServerLost(f"{self.url}: {type(error).__name__} {error}") from error
        return reply.text.splitlines() if reply.status_code == 200 else []

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            reply = await self._http.get(self.url + path)
            data = msgspec.json.decode(reply.content)
        except httpx.TransportError as error:
            raise ServerLost(f"{self.url}: {type(error).__name__} {error}") from error
        except msgspec.DecodeError:
            data = None
        if reply.status_code == 401:
            raise UsageError(f"{self.url} asks for an API key; give a file that holds it as engine.api_key_file")
        if reply.status_code != 200 or not isinstance(data, dict):
            raise UsageError(
                f"{self.url}{path} answers {reply.status_code}; give the URL of a server with OpenAI's API"
            )
        return data


UPDATES: dict[Kind, tuple[str, ...]] = {
    "agentrt": (), "vllm": ("pause", "resume", "reset_prefix_cache"),
    "sglang": ("pause_generation", "continue_generation", "update_weights_from_disk", "flush_cache"), "openai": (),
}  # fmt: skip


def _start_time(metrics: list[str]) -> float | None:
    """When its process started, if its metrics say so: another one has the weights that it started with."""
    found = [line.split()[-1] for line in metrics if line.startswith("process_start_time_seconds")]
    return float(found[0]) if found else None


def _room_of_vllm(metrics: list[str]) -> float | None:
    """Ids that its blocks hold, over all its engines; None if its metrics do not say."""
    found = 0
    for line in metrics:
        if line.startswith("vllm:cache_config_info"):
            label = dict(re.findall(r'(\w+)="(\d+)"', line))
            found += int(label.get("block_size", 0)) * int(label.get("num_gpu_blocks", 0))
    return found or None


async def _abandon(reply: httpx.Response, parts: AsyncIterator[bytes]) -> None:
    """Leave a reply in the middle. The generators inside it end only by reading on from what is closed."""
    await reply.aclose()
    with suppress(Exception):  # whichever error the closed connection gives
        async for _ in parts:
            pass


def _kind(model: dict[str, Any]) -> Kind:
    owner = model.get("owned_by")
    if "agentrt" in model:
        return "agentrt"
    return "vllm" if owner == "vllm" else "sglang" if owner == "sglang" else "openai"


def _refusal(url: str, reply: httpx.Response) -> EngineFailure:
    try:
        data = msgspec.json.decode(reply.content)
        message = data["error"]["message"] if isinstance(data.get("error"), dict) else str(data.get("error", data))
    except (msgspec.DecodeError, KeyError, AttributeError):
        message = reply.text[:200]
    kind = RequestError if 400 <= reply.status_code < 500 else EngineFailure
    return kind(f"{url} answers {reply.status_code}: {message}")
