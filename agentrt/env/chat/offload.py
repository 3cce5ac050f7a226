"""Encoding long texts off the event loop."""

from collections.abc import Callable, Sequence

from anyio import to_thread

from agentrt.env.chat.message import Message

INLINE_CHARACTERS = 4_000
"""About 5 ms of encoding, the most that a coroutine may work without a checkpoint."""


async def rendered(render: Callable[[], list[int]], messages: Sequence[Message], *, in_loop: bool = False) -> list[int]:
    """The ids that `render` makes of `messages`: at once if they are short, else in a thread (the tokenizer works without
    the interpreter's lock). `in_loop`: never a thread, as under virtual time."""
    size = sum(len(message.content) for message in messages)
    if in_loop or size <= INLINE_CHARACTERS:
        return render()
    return await to_thread.run_sync(render)
