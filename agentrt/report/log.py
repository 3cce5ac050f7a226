"""Where log events go: a JSON line each in the run folder, and warnings on the terminal too."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict

from agentrt.core.errors import RecordError


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """Within the block, structlog writes every event to `folder/agentrt.jsonl` and warnings to standard error.

    Events carry what is bound to the context (`structlog.contextvars`), such as the episode. `RecordError` if the file
    cannot be opened.
    """
    with _opened(folder) as file:
        to_file = structlog.PrintLogger(file)
        render = structlog.processors.JSONRenderer()
        say = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())

        def write(logger: Any, name: str, event: EventDict) -> str:
            with suppress(OSError):  # a full disk ends a run by its records, not by its log
                to_file.msg(str(render(logger, name, dict(event))))
            if logging.getLevelNamesMapping()[name.upper()] < logging.WARNING:
                raise structlog.DropEvent
            return str(say(logger, name, event))

        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                write,
            ],
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
            cache_logger_on_first_use=False,
        )
        try:
            yield
        finally:
            structlog.reset_defaults()


def _opened(folder: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / "agentrt.jsonl").open("a", encoding="utf-8")
    except OSError as error:
        raise RecordError(
            f"{folder}: cannot be written: {error.strerror}; make room, or choose another folder"
        ) from error
