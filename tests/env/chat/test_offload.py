"""Long texts are encoded in a thread, so that the loop goes on; short ones, and all under virtual time, at once."""

import threading
import time
from pathlib import Path

import anyio
import pytest
from trio.testing import MockClock

import agentrt
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.chatml import ChatML
from agentrt.env.chat.message import Message
from agentrt.env.chat.offload import INLINE_CHARACTERS, rendered

CHAT = ChatML(Tokenizer.load(Path(agentrt.__file__).parent / "models" / "sprout"))


async def encoded(size: int) -> threading.Thread:
    """Which thread encodes a text of that size."""
    threads, messages = list[threading.Thread](), [Message("tool", "x " * (size // 2))]

    def render() -> list[int]:
        threads.append(threading.current_thread())
        return CHAT.join(messages, ended=True)

    assert await rendered(render, messages) == CHAT.join(messages, ended=True)
    return threads[0]


@pytest.mark.anyio
@pytest.mark.parametrize(("size", "is_inline"), [(10, True), (INLINE_CHARACTERS, True), (9000, False)])
async def test_where_a_text_is_encoded(size: int, is_inline: bool) -> None:
    assert (await encoded(size) is threading.current_thread()) == is_inline


def test_virtual_time_starts_no_thread() -> None:
    clock = MockClock(autojump_threshold=0)
    assert anyio.run(encoded, 9000, backend="trio", backend_options={"clock": clock}) is threading.current_thread()


@pytest.mark.anyio
async def test_the_loop_turns_while_a_long_text_is_encoded() -> None:
    messages, ticks = [Message("tool", "The quick brown fox. " * 20_000)], 0
    done = anyio.Event()

    async def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as side:
        side.start_soon(tick)
        started = time.monotonic()
        await rendered(lambda: CHAT.join(messages, ended=True), messages)
        spent = time.monotonic() - started
        done.set()
    assert ticks > 3, f"the loop stood still for {spent} s"
