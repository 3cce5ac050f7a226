"""What a display may know of an episode while it runs."""

from collections import Counter
from collections.abc import Collection
from typing import Literal, Protocol

Phase = Literal["environment", "model", "tools", "waiting", "scoring"]
"""environment: the environment's own code; waiting: for a permit to be scored."""


class RunningEpisode(Protocol):
    """One episode, read while others run. Times are the event loop's."""

    phase: Phase
    phase_since: float
    started: float

    @property
    def label(self) -> str:
        """Task and member."""

    @property
    def turns(self) -> int: ...

    @property
    def tool_name(self) -> str:
        """The tool that it waits for."""


def by_phase(running: Collection[RunningEpisode]) -> dict[Phase, int]:
    """How many episodes are in each phase, the most first."""
    return dict(Counter(episode.phase for episode in running).most_common())


def slowest(running: Collection[RunningEpisode]) -> RunningEpisode | None:
    """The one that began first."""
    return min(running, key=lambda episode: episode.started, default=None)
