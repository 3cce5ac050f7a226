"""The error tree: one class for each boundary that a failure can cross.

A *usage error* is the user's to fix and ends the command before anything ran. An *episode error* is a value: the episode
loop turns it into a failed record, once, in one place. Everything else that is raised is a bug and reaches the top.
User code (environments, graders) raises ordinary exceptions; `attributed_to` names the boundary and keeps the cause.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class AgentrtError(Exception):
    """Root of everything that agentrt raises on purpose."""


class UsageError(AgentrtError, ValueError):
    """The caller asked for something that does not exist or cannot be. One sentence, with the fix. Exit code 2."""


class RecordError(AgentrtError, OSError):
    """A run folder cannot be read or written as asked. One sentence, with the fix. Exit code 1."""


class FetchError(AgentrtError, OSError):
    """A model cannot be fetched, or is not what it should be. One sentence, with the fix. Exit code 1."""


class WeightsError(AgentrtError, RuntimeError):
    """New weights cannot be had or do not fit the model; the old ones serve on. One sentence, with the name."""


class EpisodeError(AgentrtError, RuntimeError):
    """An episode failed; its record says so. `boundary` names whose failure it was."""

    boundary = "runtime"


class EnvironmentFailure(EpisodeError):
    """The environment's own code raised, in an episode or before there is one. Then: exit code 1."""

    boundary = "environment"


class EngineFailure(EpisodeError):
    """The engine could not finish a request that was in order when it was made."""

    boundary = "engine"


class RequestError(EngineFailure, ValueError):
    """The engine refuses a request: the message names the field and the numbers."""


class InvalidToken(EngineFailure):
    """A server sampled an id that the tokenizer does not know. The episode ends; its siblings do not hear of it."""


class SandboxFailure(EpisodeError):
    """The sandbox itself failed (not the tool in it): infrastructure, never scored."""

    boundary = "sandbox"


def is_failure(error: BaseException) -> bool:
    """True if what came out of a user's coroutine is its failure, whatever its class: `SystemExit`, the panic of a Rust
    library. Not so are an interrupt, the coroutine's close, and a cancellation that somebody asked for."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_failure, error.exceptions))
    if isinstance(error, anyio.get_cancelled_exc_class()):
        return not _is_cancelled()
    return not isinstance(error, (KeyboardInterrupt, GeneratorExit))


def _is_cancelled() -> bool:
    """Somebody has cancelled this task. asyncio's exception also comes out of an await for a task that somebody ended."""
    if anyio.get_cancelled_exc_class() is not asyncio.CancelledError:
        return True
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Turn any exception of the user's code, outside of an episode, into an `EnvironmentFailure` with it as the cause.

    `what` is what that code is. An `AgentrtError` passes unchanged: it names its own fix.
    """
    try:
        yield
    except AgentrtError:
        raise
    except Exception as error:  # it may raise anything
        raise EnvironmentFailure(f"{what} raised {type(error).__name__}: {error}") from error


@contextmanager
def attributed_to(kind: type[EpisodeError], what: str) -> Iterator[None]:
    """Turn any exception that leaves the block into `kind`, with the original as its cause.

    An `EpisodeError` passes unchanged (it already has a boundary), and so does everything that is no `Exception`:
    cancellation from outside is not a failure of the episode.
    """
    try:
        yield
    except EpisodeError:
        raise
    except Exception as error:
        raise kind(f"{what}: {error}") from error
