"""The routes: OpenAI's endpoints, the same for each recorded session, and what operators ask.

/v1/chat/completions, /v1/completions, /v1/models           X-Session-ID: ID records them too
/sessions/ID/v1/...                                         the same, recorded in session ID
/sessions/ID                GET: its record so far; DELETE: end it
/sessions/ID/reward         POST {"reward": 1.0}
/weights                    POST {"version": 3, "folder": "step-3"}, if the server takes weights
/health, /metrics
"""

import hmac
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrt.core import records, seeds
from agentrt.core.errors import AgentrtError
from agentrt.env.rubric import to_outcome
from agentrt.serve.conversation import Conversation
from agentrt.serve.endpoint import Endpoint, stream_reply, whole_reply
from agentrt.serve.exchange import Out, described, read_body, while_connected
from agentrt.serve.metrics import Metrics
from agentrt.serve.recording import Recordings
from agentrt.serve.replies import encoded
from agentrt.serve.requests import BadRequest, ChatRequest, TextRequest, read, refuse_unserved
from agentrt.serve.updates import Update, Updates

BODY_BYTES = 16 * 2**20
"""The longest body that is read."""
SESSION_HEADER = "x-session-id"
ANY_SESSION = ""
"""What a key is for that is not one session's own."""


class Reward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a session's reward."""

    reward: float


class Served:
    """What the routes share. It borrows endpoint and recordings. `keys`: what each key is for; without keys all may ask.

    Without `updates` it takes no weights.
    """

    def __init__(
        self, endpoint: Endpoint, recordings: Recordings, keys: Mapping[str, str], updates: Updates | None = None
    ) -> None:
        self.endpoint, self.recordings, self.keys, self._updates = endpoint, recordings, dict(keys), updates
        self.metrics = Metrics()

    def app(self) -> Starlette:
        """The ASGI application."""
        own = [
            Route("/sessions/{session}", self._session, methods=["GET", "DELETE"]),
            Route("/sessions/{session}/reward", self._reward, methods=["POST"]),
            Route("/weights", self._weights, methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        return application([*self.openai_routes(), *self.openai_routes("/sessions/{session}"), *own])

    def openai_routes(self, prefix: str = "") -> list[Route]:
        """OpenAI's endpoints."""
        return [
            Route(f"{prefix}/v1/chat/completions", Generate(self, ChatRequest), methods=["POST"]),
            Route(f"{prefix}/v1/completions", Generate(self, TextRequest), methods=["POST"]),
            Route(f"{prefix}/v1/models", self._models),
        ]

    def session_of(self, request: Request) -> str:
        """The session that a request is for, empty for none; `BadRequest` if its key does not open it."""
        named = request.path_params.get("session") or request.headers.get(SESSION_HEADER, "")
        if not self.keys:
            return str(named)
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        opens = [own for known, own in self.keys.items() if hmac.compare_digest(known.encode(), key.encode())]
        if scheme.lower() != "bearer" or not opens:
            raise BadRequest("the API key is missing or wrong", status=401)
        if opens[0] not in (ANY_SESSION, named or opens[0]):
            raise BadRequest("this API key is for another session", status=403)
        return str(named or opens[0])

    @contextmanager
    def conversation(self, session: str, seed: int | None, turn: int) -> Iterator[Conversation]:
        """That of a session, or one for a request alone. A session samples with seeds of its own."""
        if session:
            with self.recordings.using(session) as conversation:
                yield conversation
            return
        endpoint, own = self.endpoint, seeds.fresh() if seed is None else seed
        with Conversation(endpoint.engine, endpoint.renderer, seed=own, turn=turn) as conversation:
            yield conversation

    async def _models(self, request: Request) -> Response:
        self.session_of(request)
        info = self.endpoint.engine.info
        model = {
            "id": self.endpoint.model, "object": "model", "created": 0, "owned_by": "agentrt",
            "max_model_len": self.endpoint.room,
            "agentrt": msgspec.to_builtins(info)
            | {"version": self.endpoint.engine.statistics().version, "takes_weights": self._updates is not None},
        }  # fmt: skip
        return _json({"object": "list", "data": [model]})

    async def _session(self, request: Request) -> Response:
        session = self.session_of(request)
        if request.method == "DELETE":
            return Response(records.encode(await self.recordings.end(session)), media_type="application/json")
        return Response(records.encode(self.recordings.get(session).record()), media_type="application/json")

    async def _reward(self, request: Request) -> Response:
        session = self.session_of(request)
        reward = to_outcome(read(await read_body(request, BODY_BYTES), Reward).reward)
        if reward.score is None:
            raise BadRequest(f"reward: {reward.reason}", param="reward")
        self.recordings.get(session).reward = reward.score
        return _json({"session": session})

    async def _weights(self, request: Request) -> Response:
        if self.session_of(request):
            raise BadRequest("weights are no session's; ask with a key for all sessions", status=403)
        if self._updates is None:
            raise BadRequest("this server takes no weights; start it with --weights FOLDER", status=404)
        update = read(await read_body(request, BODY_BYTES), Update)
        return _json(msgspec.to_builtins(await self._updates.take(update)))

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics.text(self.endpoint.engine.statistics(), len(self.recordings)))


class Generate:
    """One of the two endpoints that sample, as an ASGI application: it hears when the client goes away."""

    def __init__(self, served: Served, kind: type[ChatRequest] | type[TextRequest]) -> None:
        self._served, self._kind = served, kind
        self._name = "chat" if kind is ChatRequest else "text"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out, metrics = Out(send), self._served.metrics
        metrics.num_active += 1
        try:
            request = Request(scope, receive)
            session = self._served.session_of(request)
            body = await read_body(request, BODY_BYTES)
            async with while_connected(receive, out):
                try:
                    await self._answer(read(body, self._kind), session, out)
                except AgentrtError as error:
                    await out.failure(error)
        except AgentrtError as error:
            await out.failure(error)
        finally:
            metrics.num_active -= 1
            metrics.requests[self._name, out.status] += 1

    async def _answer(self, request: Any, session: str, out: Out) -> None:
        served, endpoint = self._served, self._served.endpoint
        refuse_unserved(request)
        if not session and request.model not in ("", endpoint.model):
            raise BadRequest(
                f"no model {request.model!r} is served here, but {endpoint.model!r}", param="model", status=404
            )
        name = f"{'chatcmpl' if self._name == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"
        understood = endpoint.chat if self._name == "chat" else endpoint.text
        with served.conversation(session, request.seed, request.turn) as conversation:
            async with understood(request, conversation, name) as generation:
                if not request.stream:
                    await out.reply(await whole_reply(generation))
                    return
                with_usage = request.stream_options is not None and request.stream_options.include_usage
                await stream_reply(generation, out.event, with_usage=with_usage)
                await out.end()


def application(routes: Sequence[Route]) -> Starlette:
    """Routes with the limit on bodies, and errors in OpenAI's form."""
    return Starlette(routes=routes, exception_handlers={AgentrtError: _refused}, middleware=[Middleware(_Limit)])


class _Limit:
    """Answers a declared length that is too long before the body comes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            length = dict(scope["headers"]).get(b"content-length", b"0")
            if length.isdigit() and int(length) > BODY_BYTES:
                error = BadRequest(f"the body is longer than {BODY_BYTES} bytes", status=413)
                await Out(send).failure(error)
                return
        await self._app(scope, receive, send)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, AgentrtError)
    data, status = described(error)
    return _json(data, status)


def _json(data: Any, status: int = 200) -> Response:
    return Response(encoded(data), status, media_type="application/json")
