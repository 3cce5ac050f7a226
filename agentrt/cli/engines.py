"""Which engine a spec asks for: the model in this process, in processes of its own, or on servers."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio

from agentrt.cli.console import say
from agentrt.core.errors import UsageError
from agentrt.core.protocol import Engine, EngineInfo
from agentrt.core.spec import EngineSpec
from agentrt.core.tokenizer import Tokenizer

SWITCH_SECONDS = 0.0005
"""Of the interpreter between threads: a busy loop starved the step thread for minutes at the default of 5 ms."""


@contextmanager
def engine_for(model_folder: Path, tokenizer: Tokenizer, model: str, spec: EngineSpec) -> Iterator[Engine]:
    """The engine that a spec asks for, to be entered within the block: here, in processes of its own, or on servers."""
    if spec.engines > 1:
        from agentrt.engine.remote.spawn import spawned  # as below

        key = secrets.token_urlsafe(32)
        with spawned(model, spec, key) as urls:
            yield _remote_engine(tokenizer, urls, key)
    elif spec.urls:
        yield _remote_engine(tokenizer, spec.urls, api_key(spec))
    else:
        yield _load_engine(model_folder, tokenizer, model, spec)


def _remote_engine(tokenizer: Tokenizer, urls: Sequence[str], key: str) -> Engine:
    """The engine over servers, of which each has said what it can do."""
    try:
        from agentrt.engine.remote.engine import RemoteEngine  # here, because it needs the extra
    except ModuleNotFoundError as error:
        raise UsageError(f"engines on servers need {error.name}: pip install 'agentrt[remote]'") from None

    async def found() -> EngineInfo:
        async with RemoteEngine(urls, tokenizer, api_key=key) as engine:
            for line in engine.lines:
                say(line)
            return engine.info

    return RemoteEngine(urls, tokenizer, api_key=key, info=anyio.run(found))


def api_key(spec: EngineSpec) -> str:
    """Of the servers that a spec names; empty if they ask for none."""
    try:
        return Path(spec.api_key_file).read_text(encoding="ascii").strip() if spec.api_key_file else ""
    except OSError as error:
        raise UsageError(f"engine.api_key_file {spec.api_key_file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"engine.api_key_file {spec.api_key_file}: holds no key, which is ASCII: {error}") from error


def _load_engine(model_folder: Path, tokenizer: Tokenizer, model: str, spec: EngineSpec) -> Engine:
    """The engine over a model in this process."""
    say(f"loading {model} (the first time also compiles kernels, for up to a minute)")
    from agentrt.engine.local import local_engine  # here, because it imports torch and numba

    return local_engine(model_folder, tokenizer, spec)
