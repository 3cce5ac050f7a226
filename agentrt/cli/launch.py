"""What `run` and `eval` share: from a spec to records in a folder, with a display, on an event loop of its own."""

import platform
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio
from rich.console import Console

from agentrt.cli.console import say
from agentrt.core.errors import AgentrtError, UsageError
from agentrt.core.models import find_model
from agentrt.core.protocol import Engine, EngineInfo, EngineStatistics
from agentrt.core.spec import EngineSpec, RunSpec
from agentrt.core.tokenizer import Tokenizer
from agentrt.env import registry
from agentrt.env.chat.choose import renderer_for
from agentrt.env.environment import Environment
from agentrt.report.lines import ProgressLines
from agentrt.report.live import LiveProgress
from agentrt.report.log import logging_to
from agentrt.report.running import RunningEpisode
from agentrt.report.watchdog import watching_loop
from agentrt.rollout.order import check_split
from agentrt.rollout.run import run as roll_out
from agentrt.rollout.setup import Setup
from agentrt.rollout.sink import RunFolder
from agentrt.sandbox.probe import shared

if TYPE_CHECKING:
    from agentrt.engine.service import EngineService

INTERRUPTED = 130
SWITCH_SECONDS = 0.0005
"""Of the interpreter between threads: a busy loop starved the step thread for minutes at the default of 5 ms."""

Progress = LiveProgress | ProgressLines


class Launched(NamedTuple):
    """How a run went. Its records are in the folder."""

    folder: RunFolder
    attempts: int
    is_interrupted: bool
    seconds: float


def checked_environment(spec: RunSpec) -> Environment:
    """The environment of a spec, with its split; `UsageError` for what is wrong."""
    environment = registry.load(spec.environment, **spec.environment_args)
    check_split(environment, spec.split)
    return environment


def launch(spec: RunSpec, environment: Environment, path: Path, *, is_resumed: bool, cluster: str = "") -> Launched:
    """Run what is left of a spec into the folder at `path`. The first SIGINT or SIGTERM ends it in order.

    With a `cluster`, the address of a Ray cluster, engines and episodes are there and the records come here.
    """
    with _on_ray(cluster, spec, environment) if cluster else _here(spec, environment) as work:
        folder = RunFolder.resume(path) if is_resumed else _created(path, spec, environment, work.engine)
        say(f"{spec.environment} with {spec.model}: {spec.groups} groups of {spec.group_size} into {path}")
        started = time.perf_counter()
        with _progress(spec) as progress, folder, logging_to(folder.path / "logs"):
            sys.setswitchinterval(SWITCH_SECONDS)
            attempts, is_interrupted = anyio.run(_roll_out, work, folder, progress)
        seconds = time.perf_counter() - started
    if not attempts and not is_interrupted:
        say("this run is complete: nothing was left to do")
    return Launched(folder, attempts, is_interrupted, seconds)


class _Work(NamedTuple):
    """A run that is ready to start, wherever its episodes are."""

    engine: EngineInfo
    start: Callable[[RunFolder, Progress], Awaitable[int]]
    running: Collection[RunningEpisode] = ()
    """What can be shown of it."""
    statistics: Callable[[], EngineStatistics] = EngineStatistics


@contextmanager
def _here(spec: RunSpec, environment: Environment) -> Iterator[_Work]:
    """Episodes in this process."""
    model_folder = find_model(spec.model)
    tokenizer = Tokenizer.load(model_folder)
    renderer = renderer_for(model_folder, tokenizer)
    with engine_for(model_folder, tokenizer, spec.model, spec.engine) as engine:
        if environment.programs:
            _probe_sandbox(environment, spec)
        setup = Setup(environment=environment, engine=engine, renderer=renderer, spec=spec)

        async def start(folder: RunFolder, progress: Progress) -> int:
            async with engine:
                return await roll_out(setup, spec, folder, progress)

        yield _Work(engine.info, start, setup.running, engine.statistics)


@contextmanager
def _on_ray(address: str, spec: RunSpec, environment: Environment) -> Iterator[_Work]:
    """Engines and episodes in actors."""
    try:
        from agentrt.cluster.ray import joined  # here, because it needs the extra
        from agentrt.cluster.spread import run_over
    except ModuleNotFoundError as error:
        raise UsageError(f"--ray needs {error.name}: pip install 'agentrt[ray]'") from None
    say(f"joining the Ray cluster at {address}")
    with joined(address, spec, _api_key(spec.engine)) as crew:
        engine = crew.open()
        say(f"{len(crew.actors)} workers, one a node, over {len(crew.urls)} engines")

        async def start(folder: RunFolder, progress: Progress) -> int:
            return await run_over(crew, environment, spec, folder, progress)

        yield _Work(engine, start)


def named_by(environment: str, prefix: str = "") -> Path:
    """A folder's path for a run that was given none: outputs/NAME-TIME."""
    place, _, part = environment.partition(":")
    name = "-".join(filter(None, (Path(place).name.removesuffix(".py"), part)))
    return Path("outputs") / f"{prefix}{name}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextmanager
def engine_for(model_folder: Path, tokenizer: Tokenizer, model: str, spec: EngineSpec) -> Iterator[Engine]:
    """The engine that a spec asks for, to be entered within the block: here, in processes of its own, or on servers."""
    if spec.engines > 1:
        from agentrt.engine.remote.spawn import spawned  # as below

        key = secrets.token_urlsafe(32)
        with spawned(model, spec, key) as urls:
            yield remote_engine(tokenizer, urls, key)
    elif spec.urls:
        yield remote_engine(tokenizer, spec.urls, _api_key(spec))
    else:
        yield load_engine(model_folder, tokenizer, model, spec)


def remote_engine(tokenizer: Tokenizer, urls: Sequence[str], api_key: str) -> Engine:
    """The engine over servers, of which each has said what it can do."""
    try:
        from agentrt.engine.remote.engine import RemoteEngine  # here, because it needs the extra
    except ModuleNotFoundError as error:
        raise UsageError(f"engines on servers need {error.name}: pip install 'agentrt[remote]'") from None

    async def found() -> EngineInfo:
        async with RemoteEngine(urls, tokenizer, api_key=api_key) as engine:
            for line in engine.lines:
                say(line)
            return engine.info

    return RemoteEngine(urls, tokenizer, api_key=api_key, info=anyio.run(found))


def _api_key(spec: EngineSpec) -> str:
    try:
        return Path(spec.api_key_file).read_text(encoding="utf-8").strip() if spec.api_key_file else ""
    except OSError as error:
        raise UsageError(f"engine.api_key_file {spec.api_key_file}: cannot be read: {error.strerror}") from error


def load_engine(model_folder: Path, tokenizer: Tokenizer, model: str, spec: EngineSpec) -> "EngineService":
    """The engine over a model in this process."""
    say(f"loading {model} (the first time also compiles kernels, for up to a minute)")
    from agentrt.engine.local import local_engine  # here, because it imports torch and numba

    return local_engine(model_folder, tokenizer, spec)


def _probe_sandbox(environment: Environment, spec: RunSpec) -> None:
    """Find the level of isolation now, as it blocks, say which it is, and refuse programs that need a higher one."""
    isolation = shared().isolation
    environment.require(isolation, allow_weak=spec.sandbox.allow_weak)
    say(f"tools run isolated at {isolation.line}")


def _created(path: Path, spec: RunSpec, environment: Environment, engine: EngineInfo) -> RunFolder:
    versions = {name: version(name) for name in ("agentrt", "torch", "numba", "tokenizers")} | {
        "python": platform.python_version(), "model": engine.model_hash,
        "environment": registry.describe(environment).source_hash,
    }  # fmt: skip
    return RunFolder.create(path, spec, versions)


@contextmanager
def _progress(spec: RunSpec) -> Iterator[Progress]:
    """Live on a terminal, lines elsewhere."""
    episodes = spec.groups * spec.group_size
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield ProgressLines(sys.stderr, groups=spec.groups, episodes=episodes)
        return
    with LiveProgress(console, groups=spec.groups, episodes=episodes) as live:
        yield live


async def _roll_out(work: _Work, folder: RunFolder, progress: Progress) -> tuple[int, bool]:
    """Run what is left: attempts made, and whether a signal ended it. The second signal is the system's."""
    attempts, failure = 0, None
    async with anyio.create_task_group() as watching, watching_loop():
        watching.start_soon(progress.follow, work.running, work.statistics)
        with anyio.CancelScope() as scope:
            watching.start_soon(_cancel_on_signal, scope)
            try:
                attempts = await work.start(folder, progress)
            except AgentrtError as error:
                failure = error
        watching.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return attempts, scope.cancelled_caught


async def _cancel_on_signal(work: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            say("interrupted: episodes in flight are dropped, all others are kept; go on with --resume")
            work.cancel()
            return
