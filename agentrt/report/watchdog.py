"""The loop watchdog: names the coroutine that holds the event loop and lets nobody else run.

A task on the loop beats; a thread looks whether it still does. If not, and the loop's thread is twice found in the same
coroutine, that one holds the loop: a warning names it and the line it is at. A loop that is only busy, with many
coroutines in turn, gives no warning. Nothing is interrupted.
"""

import inspect
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType

import anyio
import structlog

from agentrt.core import clock

HELD_SECONDS = 0.5
"""How long a coroutine may work without a checkpoint before it is named."""

_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE

log = structlog.get_logger(__name__)


@asynccontextmanager
async def watching_loop(seconds: float = HELD_SECONDS) -> AsyncIterator[None]:
    """Within the block, a coroutine that holds this loop for `seconds` is named once for each place where it does.

    In virtual time, where no thread may run, nothing is watched.
    """
    if clock.is_virtual():
        yield
        return
    watch = _Watch(seconds)
    thread = threading.Thread(target=watch.run, name="agentrt-watchdog", daemon=True)
    async with anyio.create_task_group() as beating:
        beating.start_soon(watch.beat)
        thread.start()
        try:
            yield
        finally:
            watch.ended.set()
            beating.cancel_scope.cancel()
    thread.join()


class _Watch:
    """`beat` runs on the loop, `run` in the thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._loop_thread = seconds, threading.get_ident()
        self._beats = 0
        self._named: set[str] = set()
        self.ended = threading.Event()

    async def beat(self) -> None:
        while True:
            self._beats += 1
            await anyio.sleep(self._seconds / 4)

    def run(self) -> None:
        beats, holder, since = -1, None, 0.0
        while not self.ended.wait(self._seconds / 4):
            frame = _innermost_coroutine(sys._current_frames().get(self._loop_thread))
            if self._beats != beats or frame is not holder:
                beats, holder, since = self._beats, frame, time.monotonic()
            elif holder is not None and time.monotonic() - since >= self._seconds:
                self._name(holder, time.monotonic() - since)

    def _name(self, holder: FrameType, seconds: float) -> None:
        stack = "".join(traceback.format_stack(sys._current_frames().get(self._loop_thread), limit=12))
        place = f"{holder.f_code.co_filename}:{holder.f_lineno}"
        if place not in self._named:
            self._named.add(place)
            log.warning("loop_held", coroutine=holder.f_code.co_qualname, at=place, seconds=round(seconds, 3))
            log.info("loop_held_stack", at=place, frames=stack)  # to the file: too long for a terminal


def _innermost_coroutine(frame: FrameType | None) -> FrameType | None:
    """The coroutine that the thread works for; None if it is not in one (it waits for events)."""
    while frame is not None and not frame.f_code.co_flags & _COROUTINE:
        frame = frame.f_back
    return frame
