"""Encoding long texts off the event loop."""

from collections.abc import Callable, Sequence

from anyio import to_thread

from agentrt.core import clock
from agentrt.env.chat.message import Message

INLINE_CHARACTERS = 4_000
"""About 5 ms of encoding, the most that a coroutine may work without a checkpoint."""


async def encoded(encode: Callable[[], Sequence[int]], characters: int) -> Sequence[int]:
    """The ids that `encode` makes of so many characters: at once if they are few or time is virtual, else in a thread, for
    the tokenizer works without the interpreter's lock."""
    if characters <= INLINE_CHARACTERS or clock.is_virtual():
        return encode()
    return await to_thread.run_sync(encode)


async def rendered(render: Callable[[], Sequence[int]], messages: Sequence[Message]) -> Sequence[int]:
    """The ids that `render` makes of `messages`; see `encoded`."""
    return await encoded(render, sum(len(message.content) + len(message.reasoning) for message in messages))
