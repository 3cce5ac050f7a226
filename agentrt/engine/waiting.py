"""The waiting queue: turns that are to be let in, and when it is worth looking at them."""

import math
from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from agentrt.engine.sequence import Sequence

DEAF_SECONDS = 0.1
"""How long a queue that was looked at in vain is left alone."""
_rank = attrgetter("rank")


class WaitingQueue(list[Sequence]):
    """Sequences in order of rank.

    To look at them costs a plan, and who was refused would be refused again in the next step. So when nobody may be let in,
    or the first one lacks pages, the queue is left alone for a while: until a turn comes or ends, and in the second case
    until pages come free.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self.is_refused = False
        """The first one lacked pages when the queue was last looked at."""
        self._deaf_until = -math.inf
        self._pages = math.inf
        """With more pages than these the queue is looked at all the same."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by its rank."""
        self.look_again()
        insort(self, sequence, key=_rank)

    def look_again(self) -> None:
        """Something has changed: look at the queue before the next step, whatever was found the last time."""
        self._deaf_until, self.is_refused = -math.inf, False

    def is_due(self, pages: int) -> bool:
        """Whether to look at the queue before the next step, with so many pages to be had."""
        return bool(self) and not (self._clock() < self._deaf_until and pages <= self._pages)

    def looked(self, *, is_empty: bool, is_lacking: bool, pages: int) -> None:
        """It was looked at: `is_empty` if nobody may be let in, `is_lacking` if somebody lacks more than these pages."""
        self.is_refused = is_lacking and not is_empty
        self._deaf_until = self._clock() + DEAF_SECONDS if is_lacking or is_empty else -math.inf
        self._pages = math.inf if is_empty else pages
