"""Leases: what a session holds of the KV, and the life that a lease has.

    open ─► running ─► cached ─┬─► pinned         kept while a tool runs, within a budget
              ▲                ├─► parking ─► parked     saved on the host; the device's pages may go
              │                └─► dropped        nothing kept: computed again, but for what the prefix cache has
              └── from each of these, by way of restoring if pages come back from the host ─► … ─► closed

A lease holds pages of the device in its table, one reference each. On the host it holds nothing page by page: it is
anchored at the node of the prefix cache where its whole pages end, and the host keeps what open leases are anchored at.
"""

from array import array
from enum import StrEnum
from typing import TYPE_CHECKING

from agentrt.core.protocol import SessionHints
from agentrt.core.tokens import IntArray
from agentrt.engine.kv.account import Meter
from agentrt.engine.kv.pages import NONE
from agentrt.engine.kv.radix import Namespace, Node, RadixTree

if TYPE_CHECKING:
    from agentrt.engine.kv.tiers import Job


Rank = tuple[float, ...]
"""Whose turns come first: the lower."""


class State(StrEnum):
    """Where a lease is in its life."""

    OPEN = "open"
    """New: it holds nothing yet."""
    RUNNING = "running"
    """A sequence computes in it. Not revocable; the scheduler preempts the sequence first."""
    CACHED = "cached"
    """Idle, with its pages; revocable at any time."""
    PINNED = "pinned"
    """Idle, with its pages; revoked only when nothing else lets anybody go on."""
    PARKING = "parking"
    """Idle; its pages go once their copies to the host are made."""
    PARKED = "parked"
    """Idle, without pages: all that it needs is on the host."""
    RESTORING = "restoring"
    """Idle; the copies back to its pages are under way. It counts as revocable."""
    DROPPED = "dropped"
    """Idle, without pages; what is not in the prefix cache by chance is computed again."""
    CLOSED = "closed"


REVOCABLE = {State.CACHED, State.PINNED, State.RESTORING}
"""Idle, with pages that may be taken at any time."""
_IDLE = {State.CACHED, State.PINNED, State.PARKING, State.PARKED, State.RESTORING, State.DROPPED}
MOVES: dict[State, set[State]] = {
    State.OPEN: {State.RUNNING, State.CACHED, State.CLOSED},
    State.RUNNING: {State.CACHED, State.RESTORING},
    State.CACHED: {State.RUNNING, State.PINNED, State.PARKING, State.PARKED, State.DROPPED, State.CLOSED},
    State.PINNED: {State.RUNNING, State.CACHED, State.PARKING, State.PARKED, State.DROPPED, State.CLOSED},
    State.PARKING: {State.RUNNING, State.PARKED, State.DROPPED, State.CLOSED},
    State.PARKED: {State.RUNNING, State.CACHED, State.RESTORING, State.DROPPED, State.CLOSED},
    State.RESTORING: {State.RUNNING, State.CACHED, State.PARKED, State.DROPPED, State.CLOSED},
    State.DROPPED: {State.RUNNING, State.CLOSED},
    State.CLOSED: set(),
}


class IllegalMoveError(Exception):
    """A lease was asked for what it cannot do in the state it is in: a bug of the caller."""


class Pause:
    """What is known of the tool that a lease waits for. Times are of the engine's clock."""

    __slots__ = ("arguments", "deadline", "eta", "since", "tool")

    def __init__(self, tool: str, arguments: str = "", since: float = 0.0, deadline: float | None = None) -> None:
        self.tool, self.arguments, self.since, self.deadline = tool, arguments, since, deadline
        self.eta: float | None = None
        """When it will be done, by its own word."""


class Lease:
    """One session's pages. Only `KVCache` changes it, but for `hints`."""

    __slots__ = (
        "anchor",
        "branches",
        "computed",
        "high_water",
        "hints",
        "is_queued",
        "is_saved",
        "is_wanted",
        "job",
        "meter",
        "namespace",
        "number",
        "pages",
        "pause",
        "place",
        "resumed",
        "state",
        "table",
        "unshared",
    )  # fmt: skip

    def __init__(self, namespace: Namespace, num_groups: int, number: int, now: float) -> None:
        self.namespace, self.number, self.meter = namespace, number, Meter(now)
        """No two have the same. Leases are numbered in the order of their first requests, a fork with KV as it is made."""
        self.table: list[IntArray] = [array("i") for _ in range(num_groups)]
        """A row for each cache group, a page for each `page_size` ids; none where they are out of the group's window. The rows
        change, and stay the same objects."""
        self.pages = self.table[0]
        """Those of group 0, which has one at every place."""
        self.branches: list[list[IntArray]] = []
        """Tables of a draft's branches while a step verifies it. Their first pages are those of `table`."""
        self.computed = 0
        """Ids whose KV lies in the pages, from the start."""
        self.high_water = 0
        """The most ids that ever had their KV here."""
        self.anchor: Node | None = None
        """The last node of the prefix cache that lies whole in these pages, or that lay in them before they went."""
        self.state = State.OPEN
        self.job: Job | None = None
        """The copies that its pages still wait for; until they are made, none of them counts as computed."""
        self.is_queued = False
        """It waits for its pages to be saved on the host."""
        self.is_saved = False
        """All down to its anchor was on the host when it was last looked at. Only a copy that fails can make it wrong."""
        self.unshared = 0
        """Ids in its pages, or on the host, that no other open lease had when they were last counted."""
        self.resumed = now
        """When it last began to run."""
        self.pause: Pause | None = None
        self.is_wanted = False
        """A turn of its session waits to be let in."""
        self.place: Rank = (now, number)
        """The rank of its last request (`engine.readiness`), and among equals who came first."""
        self.hints = SessionHints()

    @property
    def is_running(self) -> bool:
        return self.state is State.RUNNING

    def take_place(self, rank: Rank) -> None:
        """Its last request has this rank."""
        self.place = *rank, self.number

    def move(self, state: State) -> None:
        """Go on to `state`. Raises `IllegalMoveError` if there is no such move."""
        if state not in MOVES[self.state]:
            raise IllegalMoveError(f"a lease that is {self.state} cannot become {state}")
        self.state = state

    def check(self, tree: RadixTree, page_size: int) -> None:
        """Raise `AssertionError` if what it says of itself does not go together. No step runs."""
        has_pages = self.state in REVOCABLE | {State.RUNNING, State.PARKING}
        assert has_pages or not self.pages, f"a lease that is {self.state} holds pages"
        assert not self.branches, "a lease has branches, and no step runs"
        assert self.computed <= len(self.pages) * page_size, "a lease has KV without a page for it"
        if self.pages and self.anchor:
            assert self.anchor.end <= len(self.pages), "a lease is anchored beyond its pages"
        assert self.job is None or self.computed == 0, "a lease counts KV that is still being copied"
        whole = len(self.pages) if self.job else self.computed // page_size
        for group, row in zip(tree.groups, self.table, strict=True):
            assert len(row) == len(self.pages), "the rows of a table differ in length"
            start = tree.first_kept(group, whole)
            assert [page == NONE for page in row] == [place < start for place in range(len(row))], "a window is off"
