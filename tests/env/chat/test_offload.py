"""Long texts are encoded in a thread, so that the loop goes on; short ones, and all under virtual time, at once."""

import threading
import time
from pathlib import Path

import anyio
import pytest

import agentrt
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.chatml import ChatML
from agentrt.env.chat.message import Message
from agentrt.env.chat.offload import INLINE_CHARACTERS, rendered

CHAT = ChatML(Tokenizer.load(Path(agentrt.__file__).parent / "models" / "sprout"))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("size", "in_loop", "is_inline"), [(10, False, True), (9000, False, False), (9000, True, True)]
)
async def test_where_a_text_is_encoded(size: int, in_loop: bool, is_inline: bool) -> None:
    threads, messages = list[threading.Thread](), [Message("tool", "x " * (size // 2))]

    def render() -> list[int]:
        threads.append(threading.current_thread())
        return CHAT.join(messages, ended=True)

    assert (size > INLINE_CHARACTERS) == (size == 9000)
    assert await rendered(render, messages, in_loop=in_loop) == CHAT.join(messages, ended=True)
    assert (threads[0] is threading.current_thread()) == is_inline


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
