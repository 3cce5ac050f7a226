"""What is to become of the KV of idle leases: policies over plain numbers. Pure.

A policy is asked four things: what to do with a lease as its tool starts, which leases give up their pages when somebody
lacks some, which come back first when there is room, and whose turns are let in; and it is told how long tools took. It
holds no page and starts no copy; `kv.cache` does what it says as far as that can be done, and when nobody could go on
otherwise it revokes leases that a policy would keep.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, Self

from agentrt.engine.kv.lease import Lease, Rank, State
from agentrt.engine.kv.rates import Rates

Kind = Literal["cache", "keep", "park", "drop"]
"""Let it be, revocable; pin it; save it on the host, then give up its pages; give them up."""


class LeaseView(NamedTuple):
    """A lease, which is idle but where `inside` is asked. Seconds, and ids where not said."""

    slot: int
    """Its place in the list, which names it in the answer."""
    state: State
    tokens: int
    """Whose KV it has, wherever that is."""
    unshared: int
    """Those of them that no other open lease has: what giving it up frees."""
    is_saved: bool
    """All that it would be restored from is on the host: it can be parked for nothing."""
    number: int
    """See `Lease.number`."""
    is_wanted: bool
    """Its turn waits to be let in; no tool runs."""
    tool: str = ""
    arguments: str = ""
    elapsed: float = 0.0
    """Since the tool started."""
    eta: float | None = None
    """Until it ends, by its own word; negative if that is past."""
    deadline: float | None = None
    """Until it is ended at the latest."""
    group: str = ""
    members_left: int = 0
    oldest_version: int | None = None
    context: int = 0
    """The most ids that ever had their KV here."""
    rank: Rank = (0.0,)
    """Whose turns come first: the lower; no two have the same."""
    is_running: bool = False

    @classmethod
    def of(cls, lease: Lease, page_size: int, now: float, slot: int = 0) -> Self:
        """What a lease is now."""
        pause, hints = lease.pause, lease.hints
        tokens = lease.computed or (lease.anchor.end * page_size if lease.anchor else 0)
        tool, arguments, elapsed, eta, deadline = "", "", 0.0, None, None
        if pause is not None:
            tool, arguments, elapsed = pause.tool, pause.arguments, now - pause.since
            eta = None if pause.eta is None else pause.eta - now
            deadline = None if pause.deadline is None else pause.deadline - now
        return cls(
            slot, lease.state, tokens, lease.unshared, lease.is_saved, lease.number, lease.is_wanted, tool, arguments, elapsed,
            eta, deadline, hints.group, hints.members_left, hints.oldest_version, lease.high_water,
            lease.place, lease.is_running,
        )  # fmt: skip


class Inside(NamedTuple):
    """Whose turns are let in: the first by rank, up to these."""

    with_kv: Rank
    """Of those that have KV, on the device or the host."""
    without: Rank


EVERYBODY = Inside((math.inf,), (math.inf,))


class PoolView(NamedTuple):
    """The pools, in pages of group 0."""

    page_size: int
    pages: int
    available: int
    """Free, or held by nobody but the prefix cache."""
    host_pages: int
    host_free: int
    waiting: int = 0
    """Sequences that wait to be let in."""
    lacking: int = 0
    """Pages that somebody lacks beyond the available ones."""
    is_stuck: bool = False
    """Nobody can go on without them."""
    rates: Rates = Rates()
    """What computing and copying cost."""
    inside: Inside = EVERYBODY
    """Who is let in."""


class Action(NamedTuple):
    """What is to become of one lease."""

    slot: int
    kind: Kind


class Policy(Protocol):
    """Answers for one engine. May learn from what it is asked; owns nothing."""

    @property
    def uses_host(self) -> bool:
        """Pages are to be saved on the host as turns end."""

    @property
    def spares_returning(self) -> bool:
        """A newcomer that must leave room for conversations that are expected back does not get their pages either."""

    def on_pause(self, lease: LeaseView, rates: Rates) -> Kind:
        """As a tool starts. Asked for each pause, so it must not cost more than microseconds."""

    def on_resume(self, lease: LeaseView, *, is_cut: bool) -> None:
        """Its tool has ended after `lease.elapsed` seconds; if it `is_cut`, it was ended and would have taken longer."""

    def make_room(self, leases: Sequence[LeaseView], pool: PoolView) -> list[Action]:
        """Leases to park or drop, first those that go first; enough of them for `pool.lacking`, if there are.

        `leases` are those that hold pages and do not run, least recently used first.
        """

    def prefetch(self, leases: Sequence[LeaseView], pool: PoolView) -> list[int]:
        """Slots of parked leases in the order in which they are to come back while there is room."""

    def inside(self, leases: Iterable[LeaseView], pool: PoolView) -> Inside:
        """Whose turns are let in while others run; the others wait until some of those have ended.

        `leases` are all that are open, in the order of their rank. Asked now and then.
        """


@dataclass(frozen=True, slots=True)
class Lru:
    """The least recently used goes first: to the host if `uses_host`, else for good. Nothing is pinned."""

    uses_host: bool = True
    spares_returning = True

    def on_pause(self, lease: LeaseView, rates: Rates) -> Kind:
        """Leaves it as it is."""
        return "cache"

    def on_resume(self, lease: LeaseView, *, is_cut: bool) -> None:
        """Learns nothing."""

    def make_room(self, leases: Sequence[LeaseView], pool: PoolView) -> list[Action]:
        """In the order given, but those whose turn waits last, the youngest of them first."""
        kind: Kind = "park" if self.uses_host else "drop"
        return enough(((lease, kind) for lease in in_order_of_use(leases)), pool)

    def prefetch(self, leases: Sequence[LeaseView], pool: PoolView) -> list[int]:
        """Whose turn waits; then by the end that tools foretell; then as they paused."""
        return [lease.slot for lease in sorted(leases, key=soonest)]

    def inside(self, leases: Iterable[LeaseView], pool: PoolView) -> Inside:
        """Lets all in."""
        return EVERYBODY


@dataclass(frozen=True, slots=True)
class FixedTtl:
    """Pinned for `seconds` after its tool has started; then as `Lru`."""

    seconds: float
    uses_host: bool = True
    spares_returning = True

    def on_pause(self, lease: LeaseView, rates: Rates) -> Kind:
        """Pins it."""
        return "keep"

    def on_resume(self, lease: LeaseView, *, is_cut: bool) -> None:
        """Learns nothing."""

    def make_room(self, leases: Sequence[LeaseView], pool: PoolView) -> list[Action]:
        """Expired pins and unpinned leases as `Lru`; if nobody can go on, pins too, those of the latest opened first."""
        return unpinned_first(leases, self._is_pinned, pool, "park" if self.uses_host else "drop")

    def prefetch(self, leases: Sequence[LeaseView], pool: PoolView) -> list[int]:
        """As `Lru`."""
        return Lru(self.uses_host).prefetch(leases, pool)

    def inside(self, leases: Iterable[LeaseView], pool: PoolView) -> Inside:
        """Lets all in."""
        return EVERYBODY

    def _is_pinned(self, lease: LeaseView) -> bool:
        return lease.state is State.PINNED and lease.elapsed < self.seconds


def enough(choices: Iterable[tuple[LeaseView, Kind]], pool: PoolView) -> list[Action]:
    """As many of these, in this order, as free the pages that are lacking."""
    actions, freed = [], 0
    for lease, kind in choices:
        if freed >= pool.lacking:
            break
        actions.append(Action(lease.slot, kind))
        freed += lease.unshared // pool.page_size
    return actions


def in_order_of_use(leases: Sequence[LeaseView]) -> list[LeaseView]:
    """As given, but those whose turn waits last, the youngest of them first."""
    return sorted(leases, key=lambda lease: (lease.is_wanted, -lease.number * lease.is_wanted))


def unpinned_first(
    leases: Sequence[LeaseView], is_pinned: Callable[[LeaseView], bool], pool: PoolView, kind: Kind
) -> list[Action]:
    """Give up what is not pinned, in order of use; if nobody can go on, the pinned too, those of the latest opened first."""
    free = in_order_of_use([lease for lease in leases if not is_pinned(lease)])
    actions = enough(((lease, kind) for lease in free), pool)
    if pool.is_stuck:
        latest_first = sorted(filter(is_pinned, leases), key=lambda lease: -lease.number)
        actions += enough(((lease, kind) for lease in latest_first), pool)
    return actions


def soonest(lease: LeaseView) -> tuple[bool, float, float]:
    """Whose turn waits; then by the end that tools foretell; then as they paused."""
    return not lease.is_wanted, float("inf") if lease.eta is None else lease.eta, -lease.elapsed
