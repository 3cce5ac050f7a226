"""`Priced`: keep, park or drop, whichever costs the run the least engine time. Pure.

All prices are in seconds of the engine's work lost to everybody. A lease has C ids, U of them unshared; its tool goes on for T
more seconds, of which the distribution is known (`kv.tooltime`). A token that is held for a second where others lack room costs
lambda: the share of a step that one more sequence would get for nothing, by the ids of those that are at work now.

    keep for t    lambda U E[min(T, t)], then P(T > t) times the cheaper of
    park          (lambda U + INTERFERENCE) (t_out + t_in), with t_out = 0 where the copy is made already
    drop          prefill(C - U, U) (1 + lambda U / 2)

Dividing by lambda U turns each into seconds of holding; the lease is kept for the t that is best, and if that is none, given
up. Nothing is decided before somebody lacks pages, since until then lambda is 0; from then on everything is decided anew
each time, by what tools have said and by how long they have run.

A pool in which more conversations take turns than fit it moves or computes KV at every turn. So only as many are let in, those
that came first, as fill it (`Priced.inside`); the others wait outside, and what KV they have makes way first.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from agentrt.engine.kv.lease import Rank
from agentrt.engine.kv.policy import EVERYBODY, Action, Inside, Kind, LeaseView, PoolView, enough
from agentrt.engine.kv.rates import Rates
from agentrt.engine.kv.tooltime import Remaining, ToolTimes

INTERFERENCE = 0.02
"""Of the time of a copy, lost by what is computed beside it: the share of the memory's speed that a link has."""
HOLDS = (0.05, 0.2, 1.0, 5.0, 30.0)
"""Seconds for which keeping is considered. Afterwards it is considered again."""
NEXT_HOLD = HOLDS[0]
LAST_MEMBER = 1.0
"""How much more it costs to give up the last member of a group: the whole group waits for it. Shared by those left."""
ENTER, STAY = 0.95, 1.2
"""Of the ids that fit the pool, at most, in conversations that are at work or will be soon: for one to come in without KV, and
for one to go on with what it has. Between the two nobody goes in and out."""
MOST_OVERFILL, CHEAP = 0.6, 0.01
"""What more is let in where it costs no more than these seconds to give up a conversation."""
LEAST_AT_WORK = 0.25
"""Of a pool: as much is taken to be at work, for what is given up now lets several in."""
SPREAD = 1.5
"""How far what all together hold strays, in conversations, by the root of how many fit the pool: as much of the host stays
free, and is no room for what is let in beyond the pool."""
SOON = 2.0
"""Seconds."""


class GiveUp(NamedTuple):
    """The cheapest way to give up a lease's pages, and what that costs, in seconds of the engine."""

    kind: Kind
    seconds: float


class _Choice(NamedTuple):
    order: float
    slot: int
    place: int
    """By rank, among those that are priced with it."""
    lease: LeaseView
    kind: Kind


def memory_price(pool: PoolView, idle: int) -> float:
    """Lambda: what it costs to hold one id's KV for a second, 0 while nobody lacks pages. `idle` ids belong to nobody at work.

    Another sequence saves each of those at work its part of what all need together: the fewer they are, the more.
    """
    if not (pool.lacking or pool.waiting):
        return 0.0
    at_work = (pool.pages - pool.available) * pool.page_size - idle
    return pool.rates.fixed_share / max(at_work, LEAST_AT_WORK * pool.pages * pool.page_size)


def give_up(lease: LeaseView, rates: Rates, price: float, *, has_host: bool) -> GiveUp:
    """The cheaper of parking and dropping. Without a measure of prefill, what can be parked is."""
    drop, copy = rates.prefill(lease.tokens - lease.unshared, lease.unshared), rates.copying(lease.unshared)
    if copy is None or not (lease.is_saved or has_host):
        return GiveUp("drop", 0.0 if drop is None else drop * (1 + price * lease.unshared / 2))
    moved = copy if lease.is_saved else 2 * copy
    park = moved * (price * lease.unshared + INTERFERENCE)
    if drop is not None and drop * (1 + price * lease.unshared / 2) < park:
        return GiveUp("drop", drop * (1 + price * lease.unshared / 2))
    return GiveUp("park", park)


def holding_costs_more(remaining: Remaining, worth: float, floor: float = -math.inf) -> float:
    """By how many seconds of holding it is dearer to keep a lease than to give it up now; negative if it is cheaper.

    `worth` is what giving it up costs, as seconds of holding it. Where no time of keeping is worth its price, this is the
    price of waiting `NEXT_HOLD` seconds: the more, the less likely its tool ends in that time. It may be too much where it is
    no more than `floor`.
    """
    excess = math.inf
    for seconds in HOLDS:
        within, outlasts = remaining.held(seconds)
        excess = min(excess, within + outlasts * worth - worth)
        if excess <= floor:
            break
    return excess


class Priced:
    """Learns the times of tools from what it is told."""

    uses_host = True
    spares_returning = False
    """Whether one that will be back soon keeps its pages is a matter of price, for whoever needs them as well."""

    def __init__(self) -> None:
        self.times = ToolTimes()

    def on_pause(self, lease: LeaseView, rates: Rates) -> Kind:
        """Leaves it: revocable at any time, which costs nothing while nobody lacks pages."""
        return "cache"

    def on_resume(self, lease: LeaseView, *, is_cut: bool) -> None:
        """Counts the call."""
        self.times.add(lease.tool, lease.arguments, lease.elapsed, is_cut=is_cut)

    def make_room(self, leases: Sequence[LeaseView], pool: PoolView) -> list[Action]:
        """Those that wait outside, the latest come first; then those whose keeping costs more than giving them up, all of them
        if nobody can go on otherwise; then those whose turns wait to be let in, again the latest come first.

        A turn that waits is no use with what it has until those before it are in.
        """
        return enough(self._in_order(leases, pool), pool)

    def prefetch(self, leases: Sequence[LeaseView], pool: PoolView) -> list[int]:
        """Whose turn waits, in the order they were opened; then those most likely to be back by the time they are here."""
        inside = (lease for lease in leases if lease.rank <= pool.inside.with_kv)
        return [lease.slot for lease in sorted(inside, key=lambda lease: self._return_key(lease, pool.rates))]

    def inside(self, leases: Iterable[LeaseView], pool: PoolView) -> Inside:
        """As many conversations, the first come first, as fill the pool with what they will soon have at work in it.

        More would take turns in the pool, and each would have to bring its KV back, or compute it again, at each turn.
        """
        leases = list(leases)
        room, used, without = pool.pages * pool.page_size, 0.0, EVERYBODY.without
        if sum(lease.context for lease in leases) <= ENTER * room:
            return EVERYBODY
        more = self._overfill(leases, pool)
        for lease in leases:
            used += lease.context * self._soon(lease)
            if used > (ENTER + more) * room:
                without = min(without, lease.rank)
            if used > (STAY + more) * room:
                return Inside(lease.rank, without)
        return Inside(EVERYBODY.with_kv, without)

    def _in_order(self, leases: Sequence[LeaseView], pool: PoolView) -> Iterator[tuple[LeaseView, Kind]]:
        """Who is given up and how, those first that go first. Nobody is priced before it is his turn."""
        price, by_rank = memory_price(pool, sum(one.unshared for one in leases)), sorted(leases, key=attrgetter("rank"))
        for lease in reversed(by_rank):
            if lease.rank > pool.inside.with_kv:
                yield lease, self._way(lease, pool, price, pool.host_free).kind
        inside = [lease for lease in by_rank if lease.rank <= pool.inside.with_kv]
        yield from self._dearest_first(inside, pool, price)

    def _dearest_first(
        self, leases: Sequence[LeaseView], pool: PoolView, price: float
    ) -> Iterator[tuple[LeaseView, Kind]]:
        """Those whose keeping costs more than giving them up, all of them if nobody can go on otherwise; then the wanted.
        What the host has no room for beside those before it is priced as if there were no host, and comes where it belongs."""
        room = pool.host_free
        for is_wanted in (False, True):
            stage = enumerate(lease for lease in leases if lease.is_wanted == is_wanted)
            heap = [self._choice(lease, pool, price, place, room) for place, lease in stage]
            heapify(heap)
            while heap and (is_wanted or pool.is_stuck or heap[0].order < 0.0):
                _, _, place, lease, kind = heappop(heap)
                pages = lease.unshared // pool.page_size
                if kind == "park" and pages > room:
                    heappush(heap, self._choice(lease, pool, price, place, room))
                    continue
                room -= pages if kind == "park" else 0
                yield lease, kind

    def _choice(self, lease: LeaseView, pool: PoolView, price: float, place: int, room: int) -> _Choice:
        way = self._way(lease, pool, price, room)
        order = (
            -float(place) if lease.is_wanted else -self._excess(lease, way, price, -math.inf if pool.is_stuck else 0.0)
        )
        return _Choice(order, lease.slot, place, lease, way.kind)

    def _way(self, lease: LeaseView, pool: PoolView, price: float, room: int) -> GiveUp:
        has_host = lease.unshared // pool.page_size <= room
        return give_up(lease if has_host else lease._replace(is_saved=False), pool.rates, price, has_host=has_host)

    def _overfill(self, leases: Sequence[LeaseView], pool: PoolView) -> float:
        """How much more may be let in: the less, the more it costs to give up a conversation of middling length.

        What counts is the size of the host. What is free on it changes from one moment to the next; conversations would be
        let in and sent out again with it, and each time one is sent out its KV makes way. The fewer fit the pool, the more of
        the host has to stay free for that.
        """
        contexts = [lease.context for lease in leases if lease.context]
        if not contexts:
            return 0.0
        typical = sum(contexts) // len(contexts)
        lease = leases[0]._replace(tokens=typical, unshared=typical, is_saved=False)
        has_host = pool.host_pages * pool.page_size > typical
        price = pool.rates.fixed_share / (pool.pages * pool.page_size)  # with the whole pool at work, as is the aim
        cost = give_up(lease, pool.rates, price, has_host=has_host).seconds
        kept_free = SPREAD * math.sqrt(typical / (pool.pages * pool.page_size))
        most = min(MOST_OVERFILL, max(pool.host_pages / pool.pages - kept_free, 0.0))
        return most * min(CHEAP / cost, 1.0) if cost else 0.0

    def _soon(self, lease: LeaseView) -> float:
        """The chance that it is at work soon."""
        if lease.is_running or lease.is_wanted:
            return 1.0
        return 1 - self._remaining(lease).outlasts(SOON) if lease.tool else 0.0

    def _excess(self, lease: LeaseView, way: GiveUp, price: float, floor: float = -math.inf) -> float:
        if not price or not lease.unshared:
            return NEXT_HOLD
        worth = way.seconds * (1 + (LAST_MEMBER / lease.members_left if lease.members_left else 0.0))
        return holding_costs_more(self._remaining(lease), worth / (price * lease.unshared), floor)

    def _return_key(self, lease: LeaseView, rates: Rates) -> tuple[bool, Rank]:
        if lease.is_wanted:
            return False, lease.rank
        copy = rates.copying(lease.unshared) or 0.0
        return True, (self._remaining(lease).outlasts(max(copy, NEXT_HOLD)),)

    def _remaining(self, lease: LeaseView) -> Remaining:
        return self.times.remaining(lease.tool, lease.arguments, lease.elapsed, eta=lease.eta, deadline=lease.deadline)
