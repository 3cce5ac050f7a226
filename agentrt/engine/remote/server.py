"""`Server`: one server as its client knows it: what it can do, whether it is there, which weights it has."""

import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeVar

import anyio
import httpx
import msgspec

from agentrt.core.errors import EngineFailure, RequestError, UsageError, WeightsError
from agentrt.core.protocol import UpdateMode, UpdateReport
from agentrt.core.spec import SamplingParams
from agentrt.engine.remote.router import Belief
from agentrt.engine.remote.wire import Asked, Dialect, LawOf, OpenAI, Piece, SGLang, read_piece, to_version

CONNECT_SECONDS = 10.0
BUSY_SECONDS = 0.5
"""Between two tries at a server that says it is busy (429, 503), as in a pause."""
PROBE = 1
"""An id that every model has."""
PROBE_SECONDS = 60.0
"""How long a server that was lost may take to say what it is."""
EVENT_BYTES = 1 << 26
"""Of an event in a stream, at most."""

Kind = Literal["agentrt", "vllm", "sglang", "openai"]
Said = TypeVar("Said", bound=msgspec.Struct)


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

    @property
    def law(self) -> tuple[str, str, str]:
        """What all servers of one engine must have in common."""
        return self.model, self.model_hash, self.logprobs_of

    def line(self, url: str) -> str:
        """For people."""
        room = f"room for {self.room:.0f} ids" if math.isfinite(self.room) else "room not said"
        return (
            f"{url}: {self.kind}, {self.model}, context {self.context_length}, logprobs of {self.logprobs_of}, versions "
            f"{'by the server' if self.says_version else 'by this client'}, cached tokens "
            f"{'reported' if self.says_cached else 'unknown'}, {room}, updates: {', '.join(self.updates) or 'none'}"
        )


class _Own(msgspec.Struct):
    """What `agentrt serve` says of its model."""

    version: int = 0
    kv_tokens: int = 0
    logprobs_of: LawOf | None = None
    model_hash: str = ""
    takes_weights: bool = False


class _Model(msgspec.Struct):
    id: str = ""
    owned_by: str | None = None
    max_model_len: int | None = None
    agentrt: _Own | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _ModelInfo(msgspec.Struct):
    """Of SGLang."""

    weight_version: str | int | None = None
    context_length: int | None = None


class _ServerInfo(msgspec.Struct):
    """Of SGLang."""

    max_total_num_tokens: int | None = None


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
        listed = await self._get("/v1/models", _Models)
        model = listed.data[0] if listed.data else _Model()
        kind, own = _kind(model), model.agentrt or _Own()
        self.dialect = SGLang() if kind == "sglang" else OpenAI(model.id, is_ours=kind == "agentrt")
        says_version, context = kind == "agentrt", model.max_model_len
        metrics = await self._metrics()
        room = own.kv_tokens or _room_of_vllm(metrics)
        if kind == "sglang":
            info = await self._get("/get_model_info", _ModelInfo)
            version = to_version(info.weight_version)
            says_version, context = version is not None, context or info.context_length
            self.version = version or 0
            room = (await self._get("/get_server_info", _ServerInfo)).max_total_num_tokens
        elif kind == "agentrt":
            self.version = own.version
        law, says_cached = await self._probe_law()
        self.capabilities = Capabilities(
            kind=kind, model=model.id, context_length=context or 4096, logprobs_of=own.logprobs_of or law,
            says_version=says_version, says_cached=says_cached, model_hash=own.model_hash, room=room or math.inf,
            updates=("weights",) if own.takes_weights else UPDATES[kind],
        )  # fmt: skip
        self.belief.room = self.capabilities.room
        self._started = _start_time(metrics)

    async def why_away(self) -> str:
        """Ask a lost server again: why it cannot be used yet, or nothing if it can.

        If it was restarted, what it held is forgotten and its version is read anew.
        """
        before, started, version = self.capabilities, self._started, self.version
        try:
            with anyio.fail_after(PROBE_SECONDS):
                await self.probe()
        except TimeoutError:
            return f"it does not say what it is within {PROBE_SECONDS:g} s"
        except (ServerLost, EngineFailure, UsageError) as error:
            return str(error)
        if self.capabilities.law != before.law:
            why = f"it is another one now: {self.capabilities.line(self.url)}"
            self.capabilities = before
            return why
        if self._started != started or self._started is None:
            self.belief.flush()
            if not self.capabilities.says_version:
                self.version = 0  # what it started with; who publishes weights says when it has others
        if self.version != version:
            self.belief.flush()
        return ""

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
                    if reply.status_code in (502, 504):
                        raise ServerLost(f"{self.url}: its gateway answers {reply.status_code}")
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
        try:
            report = msgspec.json.decode(reply.content, type=UpdateReport)
        except msgspec.DecodeError as error:
            raise WeightsError(f"{self.url} does not say how its update went: {error}") from error
        self.version = version
        self.belief.flush()
        return report

    async def _read(self, reply: httpx.Response, take: Callable[[Piece], None]) -> None:
        parts, rest, so_far = reply.aiter_raw(), b"", 0
        try:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > EVENT_BYTES:
                    raise EngineFailure(f"{self.url} sent an event of more than {EVENT_BYTES} bytes")
                for line in lines:
                    piece = read_piece(self.dialect, line.rstrip(b"\r"), so_far)
                    if piece is not None:
                        so_far += len(piece.token_ids)
                        take(piece)
        except Exception:  # of the reply, or of who takes it
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

    async def _get(self, path: str, kind: type[Said]) -> Said:
        try:
            reply = await self._http.get(self.url + path)
        except httpx.TransportError as error:
            raise ServerLost(f"{self.url}: {type(error).__name__} {error}") from error
        if reply.status_code == 401:
            raise UsageError(f"{self.url} asks for an API key; give a file that holds it as engine.api_key_file")
        why = ""
        if reply.status_code == 200:
            try:
                return msgspec.json.decode(reply.content, type=kind)
            except msgspec.DecodeError as error:
                why = f" in a form of its own ({error})"
        raise UsageError(
            f"{self.url}{path} answers {reply.status_code}{why}; give the URL of a server with OpenAI's API"
        )


UPDATES: dict[Kind, tuple[str, ...]] = {
    "agentrt": (), "vllm": ("pause", "resume", "reset_prefix_cache"),
    "sglang": ("pause_generation", "continue_generation", "update_weights_from_disk", "flush_cache"), "openai": (),
}  # fmt: skip


def _start_time(metrics: list[str]) -> float | None:
    """When its process started, if its metrics say so: another one has the weights that it started with."""
    found = [line.split()[-1] for line in metrics if line.startswith("process_start_time_seconds")]
    with suppress(ValueError):
        return float(found[0]) if found else None
    return None


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


def _kind(model: _Model) -> Kind:
    if model.agentrt is not None:
        return "agentrt"
    return "vllm" if model.owned_by == "vllm" else "sglang" if model.owned_by == "sglang" else "openai"


def _refusal(url: str, reply: httpx.Response) -> EngineFailure:
    try:
        data = msgspec.json.decode(reply.content)
        message = data["error"]["message"] if isinstance(data.get("error"), dict) else str(data.get("error", data))
    except (msgspec.DecodeError, KeyError, AttributeError):
        message = reply.text[:200]
    kind = RequestError if 400 <= reply.status_code < 500 else EngineFailure
    return kind(f"{url} answers {reply.status_code}: {message}")
