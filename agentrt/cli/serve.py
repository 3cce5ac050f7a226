"""`agentrt serve`: a model behind OpenAI's API, which records what its clients do in sessions."""

import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from agentrt.cli.console import say
from agentrt.cli.engines import SWITCH_SECONDS, engine_for
from agentrt.core import seeds
from agentrt.core.errors import RecordError, UsageError
from agentrt.core.models import find_model
from agentrt.core.protocol import Engine
from agentrt.core.records import Appender, EpisodeRecord
from agentrt.core.spec import EngineSpec, convert, override
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.choose import renderer_for
from agentrt.rollout.sink import require_writable, trajectories_in

if TYPE_CHECKING:
    from agentrt.serve.endpoint import Endpoint
    from agentrt.serve.recording import Recordings

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_SESSIONS = 4096
TIDY_SECONDS = 60.0


def serve(
    model: Annotated[str, typer.Argument(help="A model's name, its folder, or org/name on the hub.")] = "sprout",
    host: Annotated[
        str, typer.Option(help="Where to listen; another than this machine alone needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    api_keys: Annotated[
        Path | None, typer.Option("--api-keys", help="A file with one API key a line; without it no key is asked for.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder; sessions are appended to its trajectories.jsonl.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="A folder; new weights are taken from folders in it, by POST /weights."),
    ] = None,
    sock: Annotated[
        int | None,
        typer.Option("--socket", hidden=True, help="A descriptor that listens; for `engine.engines`."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the recorded sessions.  \\[default: a fresh one]")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the engine's spec; repeatable.")
    ] = None,
) -> None:
    """Serve a model to programs that speak OpenAI's API.

    Requests under /sessions/ID/v1, or with the header X-Session-ID, are recorded with their exact tokens.

    Examples:

    [cyan]agentrt serve[/cyan]

    [cyan]agentrt serve smollm2-135m --port 9000 -o outputs/served --set kv_tokens=131072[/cyan]

    [cyan]agentrt serve smollm2-135m --weights checkpoints[/cyan]
    """
    if host not in LOOPBACK and api_keys is None:
        raise UsageError(f"--host {host} lets other machines ask; give --api-keys FILE, or keep to 127.0.0.1")
    spec = convert(override({}, assignments or []), EngineSpec, "--set")
    keys = _keys(api_keys) if sock is None else [sys.stdin.readline().strip()]
    _require_extra()
    from agentrt.serve.app import ANY_SESSION  # here, because these need the extra
    from agentrt.serve.endpoint import Endpoint
    from agentrt.serve.server import listening

    folder = find_model(model)
    tokenizer = Tokenizer.load(folder)
    renderer = renderer_for(folder, tokenizer)
    with ExitStack() as stack:
        write = _forget if output is None else stack.enter_context(_appended(output)).append
        own = socket.socket(fileno=sock) if sock is not None else listening(host, port)
        stack.enter_context(own)
        engine = stack.enter_context(engine_for(folder, tokenizer, model, spec))
        room = min(engine.info.context_length, engine.info.kv_tokens or spec.pool_tokens)
        endpoint = Endpoint(engine, renderer, model=model, room=room)
        sys.setswitchinterval(SWITCH_SECONDS)
        run_seed = seeds.fresh() if seed is None else seed
        all_sessions, is_child = dict.fromkeys(keys, ANY_SESSION), sock is not None
        anyio.run(_serve, engine, endpoint, write, run_seed, own, all_sessions, weights, is_child)


async def _serve(
    engine: Engine,
    endpoint: "Endpoint",
    write: Callable[[EpisodeRecord], None],
    seed: int,
    sock: socket.socket,
    keys: dict[str, str],
    weights: Path | None,
    is_child: bool,
) -> None:
    """Until a signal comes; for whoever started it as a child, until standard input ends."""
    from agentrt.serve.app import Served
    from agentrt.serve.recording import Recordings
    from agentrt.serve.server import serving
    from agentrt.serve.updates import Updates

    updates = None if weights is None else Updates(engine, weights)
    async with engine:
        with Recordings(engine, endpoint.renderer, write, seed=seed, max_sessions=MAX_SESSIONS) as recordings:
            async with (
                serving(Served(endpoint, recordings, keys, updates).app(), sock),
                anyio.create_task_group() as group,
            ):
                group.start_soon(_tidy, recordings)
                if is_child:
                    await anyio.wait_readable(sys.stdin)
                else:
                    host, port = sock.getsockname()[:2]
                    say(f"{endpoint.model} at http://{host}:{port}/v1, to end with Ctrl-C")
                    await _signal()
                group.cancel_scope.cancel()


async def _signal() -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            return


async def _tidy(recordings: "Recordings") -> None:
    """End the sessions that nobody uses, now and then. Those that cannot be written stay open."""
    while True:
        await anyio.sleep(TIDY_SECONDS)
        try:
            recordings.end_idle()
        except RecordError as error:
            say(f"agentrt: {error}")


def _appended(folder: Path) -> AbstractContextManager[Appender[EpisodeRecord]]:
    """Where sessions are written. `RecordError` if that cannot be."""
    require_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return trajectories_in(folder)


def _keys(path: Path | None) -> list[str]:
    """The keys of a file, of which each opens every session."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="ascii").split()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: holds no keys, which are ASCII: {error}") from error
    if not lines:
        raise UsageError(f"{path} holds no key; write one a line")
    return lines


def _require_extra() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"the server needs {error.name}: pip install 'agentrt[serve]'") from None


def _forget(record: EpisodeRecord) -> None:
    """Without a folder, sessions are kept while they are open."""
