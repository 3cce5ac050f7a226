"""The rules of published systems, as policies to compare with. Pure.

They decide as their authors say; what a policy of this engine cannot choose (when copies are made, the order in which turns
are let in) is the engine's own for all of them.
"""

import math
from collections.abc import Iterable, Sequence

from agentrt.engine.kv.policy import (
    EVERYBODY,
    Action,
    Inside,
    Kind,
    LeaseView,
    PoolView,
    enough,
    in_order_of_use,
    soonest,
    unpinned_first,
)
from agentrt.engine.kv.rates import Rates

COLD_CALLS = 100
"""With fewer calls of a tool, Continuum takes those of all tools; with fewer of all, the exponential law of mean one second."""


def best_ttl(durations: Sequence[float], value: float) -> float:
    """The t of 0 and `durations` with the largest share(ended within t) * value - t; without durations ln(value), their
    optimum for the exponential law of mean one second."""
    if not durations:
        return math.log(value) if value > 1 else 0.0
    ordered = sorted(durations)
    gain, ttl = max((at / len(ordered) * value - seconds, -seconds) for at, seconds in enumerate(ordered, 1))
    return -ttl if gain > 0 else 0.0


class CacheTtl:
    """Continuum (arXiv 2511.02230): pins a lease for the t that is best for share(ended within t) * (wait + reload) - t.

    `wait` is what turns whose KV was gone waited lately, `reload` the time to bring or compute it again; memoryfulness is 1.
    After t it is as `Lru`. Memory has no price here: t costs the same for 500 ids as for 100,000.
    """

    uses_host = True
    spares_returning = False

    def __init__(self) -> None:
        self._durations: dict[str, list[float]] = {"": []}
        """By tool; of all under the empty name."""
        self._ttls: dict[int, float] = {}
        """By the number of the lease."""

    def on_pause(self, lease: LeaseView, rates: Rates) -> Kind:
        """Pins it for that time."""
        reload = rates.copying(lease.unshared) or rates.prefill(0, lease.tokens) or 0.0
        known = self._durations.get(lease.tool, [])
        if len(known) < COLD_CALLS:
            known = self._durations[""] if len(self._durations[""]) >= COLD_CALLS else []
        self._ttls[lease.number] = best_ttl(known[-512:], rates.wait + reload)
        return "keep" if self._ttls[lease.number] > 0 else "cache"

    def on_resume(self, lease: LeaseView, *, is_cut: bool) -> None:
        """Counts the call."""
        self._ttls.pop(lease.number, None)
        for tool in {lease.tool, ""}:
            self._durations.setdefault(tool, []).append(lease.elapsed)

    def make_room(self, leases: Sequence[LeaseView], pool: PoolView) -> list[Action]:
        """Expired pins and unpinned leases as `Lru`; if nobody can go on, pins too, those of the latest opened first."""
        return unpinned_first(leases, lambda lease: lease.elapsed < self._ttls.get(lease.number, 0.0), pool, "park")

    def prefetch(self, leases: Sequence[LeaseView], pool: PoolView) -> list[int]:
        """As `Lru`."""
        return [lease.slot for lease in sorted(leases, key=soonest)]

    def inside(self, leases: Iterable[LeaseView], pool: PoolView) -> Inside:
        """Lets all in."""
        return EVERYBODY


class InferCept:
    """InferCept (ICML 2024) with the durations of tools given: the least waste of memory times time.

    Waste of keeping C ids for T seconds is T C; of dropping them, with R ids of others that stand by, prefill * (C + R);
    of swapping, 2 copy C, since the copies are made while others compute. T is what tools foretell (their `eta`): where they
    say nothing it is the time that they have run, as for a tool whose duration is unknown.
    """

    uses_host = True
    spares_returning = False

    def on_pause(self, lease: LeaseView, rates: Rates) -> Kind:
        """Leaves it until somebody lacks pages: its waste is none before."""
        return "cache"

    def on_resume(self, lease: LeaseView, *, is_cut: bool) -> None:
        """Learns nothing."""

    def make_room(self, leases: Sequence[LeaseView], pool: PoolView) -> list[Action]:
        """Those whose keeping wastes more than giving them up, the most wasteful first; all if nobody can go on otherwise."""
        ranked = []
        for lease in in_order_of_use(leases):
            kept = lease.tokens * max(lease.elapsed if lease.eta is None else lease.eta, 0.0)
            kind, waste = self._fallback(lease, pool)
            if pool.is_stuck or lease.is_wanted or kept > waste:
                ranked.append((lease.is_wanted, waste - kept, lease, kind))
        ranked.sort(key=lambda item: item[:2])
        return enough(((lease, kind) for *_, lease, kind in ranked), pool)

    def prefetch(self, leases: Sequence[LeaseView], pool: PoolView) -> list[int]:
        """Whose turn waits, as they were opened; then those that end first."""
        return [lease.slot for lease in sorted(leases, key=soonest)]

    def inside(self, leases: Iterable[LeaseView], pool: PoolView) -> Inside:
        """Lets all in."""
        return EVERYBODY

    def _fallback(self, lease: LeaseView, pool: PoolView) -> tuple[Kind, float]:
        others = (pool.pages - pool.available) * pool.page_size - lease.unshared
        copy, prefill = pool.rates.copying(lease.unshared), _prefill(lease, pool.rates)
        drop = math.inf if prefill is None else prefill * (lease.tokens + max(others, 0))
        if copy is None or not (lease.is_saved or pool.host_free * pool.page_size > lease.unshared):
            return "drop", 0.0 if math.isinf(drop) else drop
        swap = (1 if lease.is_saved else 2) * copy * lease.tokens
        return ("drop", drop) if drop < swap else ("park", swap)


def _prefill(lease: LeaseView, rates: Rates) -> float | None:
    return rates.prefill(lease.tokens - lease.unshared, lease.unshared)
