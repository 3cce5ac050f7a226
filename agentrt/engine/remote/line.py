"""`Line`: turns that wait until some server has room for their KV, the conversations that began first before the others."""

from bisect import insort
from operator import itemgetter

import anyio

LOOK_SECONDS = 1.0
"""Between two looks for room, if no turn ends meanwhile: conversations that stay away give theirs back by time."""


class Line:
    """Holds events of those that wait, and nothing of why. `age` is smaller for those that come first."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, anyio.Event]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def is_behind(self, age: int) -> bool:
        """Whether somebody older waits."""
        return bool(self._waiting) and self._waiting[0][0] < age

    async def wait(self, age: int) -> None:
        """Until it is worth to look again."""
        place = (age, anyio.Event())
        insort(self._waiting, place, key=itemgetter(0))
        try:
            with anyio.move_on_after(LOOK_SECONDS):
                await place[1].wait()
        finally:
            self._waiting.remove(place)

    def look(self) -> None:
        """There may be room: the first one looks."""
        if self._waiting:
            self._waiting[0][1].set()
