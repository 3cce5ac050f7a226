"""What `run` and `eval` share: from a spec to records in a folder, with a display, on an event loop of its own."""

import platform
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import anyio
from rich.console import Console

from agentrt.cli.console import say
from agentrt.cli.engines import SWITCH_SECONDS, api_key, engine_for
from agentrt.core.errors import AgentrtError, UsageError
from agentrt.core.models import find_model
from agentrt.core.protocol import EngineInfo, EngineStatistics
from agentrt.core.spec import RunSpec
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
from agentrt.rollout.sink import RunFolder, require_new, stored_run
from agentrt.sandbox.probe import shared

INTERRUPTED = 130
Progress = LiveProgress | ProgressLines


class Launched(NamedTuple):
    """How a run went. Its records are in the folder."""

    folder: RunFolder
    attempts: int
    is_interrupted: bool
    seconds: float
    sampled: int
    """Tokens in these seconds."""


def checked_environment(spec: RunSpec) -> Environment:
    """The environment of a spec, with its split; `UsageError` for what is wrong."""
    environment = registry.load(spec.environment, **spec.environment_args)
    check_split(environment, spec.split)
    return environment


def launch(spec: RunSpec, environment: Environment, path: Path, *, is_resumed: bool, cluster: str = "") -> Launched:
    """Run what is left of a spec into the folder at `path`. The first SIGINT or SIGTERM ends it in order.

    With a `cluster`, the address of a Ray cluster, engines and episodes are there and the records come here.
    """
    if not is_resumed:
        require_new(path)  # now, for a model takes long to load
    with _on_ray(cluster, spec, environment) if cluster else _here(spec, environment) as work:
        versions = _versions(environment, work.engine)
        folder = _resumed(path, versions) if is_resumed else RunFolder.create(path, spec, versions)
        say(f"{spec.environment} with {spec.model}: {spec.groups} groups of {spec.group_size} into {path}")
        started = time.perf_counter()
        try:
            with _progress() as progress, folder, logging_to(folder.path / "logs"):
                sys.setswitchinterval(SWITCH_SECONDS)
                attempts, is_interrupted = anyio.run(_roll_out, work, folder, progress)
        except AgentrtError:
            if not is_resumed:
                folder.remove_if_empty()
            raise
        seconds = time.perf_counter() - started
    if not attempts and not is_interrupted:
        say("this run is complete: nothing was left to do")
    return Launched(folder, attempts, is_interrupted, seconds, progress.tally.sampled)


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
    with joined(address, spec, api_key(spec.engine)) as crew:
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


def _probe_sandbox(environment: Environment, spec: RunSpec) -> None:
    """Find the level of isolation now, as it blocks, say which it is, and refuse programs that need a higher one."""
    isolation = shared().isolation
    environment.require(isolation, allow_weak=spec.sandbox.allow_weak)
    say(f"tools run isolated at {isolation.line}")


def _versions(environment: Environment, engine: EngineInfo) -> dict[str, str]:
    """Of all that a record depends on."""
    return {name: version(name) for name in ("agentrt", "torch", "numba", "tokenizers")} | {
        "python": platform.python_version(), "model": engine.model_hash,
        "environment": registry.describe(environment).source_hash,
    }  # fmt: skip


def _resumed(path: Path, versions: Mapping[str, str]) -> RunFolder:
    """The folder of an earlier run; says what has changed since, as the run's records will be of both."""
    before = stored_run(path).versions
    known = [name for name in versions if versions[name] and before.get(name)]  # a server may not say its model's hash
    changed = [name for name in known if before[name] != versions[name]]
    if changed:
        say(f"not as it was when this run began: {', '.join(changed)}; what is left is run with what is here now")
    return RunFolder.resume(path)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Live on a terminal, lines elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield ProgressLines(sys.stderr)
        return
    with LiveProgress(console) as live:
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
