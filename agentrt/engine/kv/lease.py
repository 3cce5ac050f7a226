"""Leases: what a session holds of the KV.

A lease is a page table and the number of ids whose KV lies in it. It is priced in nothing yet, but it is revocable: when a
page is needed and none is free or evictable, the least recently used idle lease is revoked. Its whole pages are in the
prefix cache by then, so a revoked conversation recomputes only what was evicted since.
"""

from array import array
from collections.abc import Iterable, Iterator

from agentrt.core.tokens import IntArray
from agentrt.engine.kv.pages import PagePool
from agentrt.engine.kv.radix import Namespace, Node, RadixTree


class Lease:
    """One session's pages. Only `KVCache` changes it."""

    __slots__ = ("anchor", "computed", "is_running", "namespace", "pages")

    def __init__(self, namespace: Namespace, anchor: Node) -> None:
        self.namespace = namespace
        self.pages: IntArray = array("i")
        self.computed = 0
        """Ids whose KV lies in the pages, from the start."""
        self.anchor = anchor
        """The last node of the prefix cache that lies whole in these pages."""
        self.is_running = False
        """A running lease is not revoked; the scheduler preempts its sequence first."""


class KVCache:
    """The page pool, the prefix cache over it, and every lease: all that decides which page holds what."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(self.pool, page_size)
        self._leases: dict[Lease, None] = {}  # in order of last use

    @property
    def num_available(self) -> int:
        """Pages that are free or become so by evicting what nobody holds."""
        return self.pool.num_free + self.pool.num_evictable

    def open(self, namespace: Namespace) -> Lease:
        """A new, empty lease; its owner closes it."""
        lease = Lease(namespace, self.tree.root(namespace))
        self._leases[lease] = None
        return lease

    def close(self, lease: Lease) -> None:
        """Give everything back. Closing twice does nothing."""
        if lease in self._leases:
            self.revoke(lease)
            del self._leases[lease]

    def revoke(self, lease: Lease) -> None:
        """Take the pages from a lease that stays open; what is in the prefix cache stays there, evictable."""
        self.pool.release(lease.pages)
        lease.pages, lease.computed, lease.anchor = array("i"), 0, self.tree.root(lease.namespace)

    def resume(self, lease: Lease, ids: IntArray, matchable: int) -> int:
        """Make a lease run again; an empty one takes the longest cached prefix of the first `matchable` of `ids`.

        Returns how many ids have their KV.
        """
        lease.is_running = True
        self._leases[lease] = self._leases.pop(lease)
        if not lease.pages:
            lease.anchor, pages = self.tree.match(lease.namespace, ids, matchable // self.page_size)
            self.pool.retain(pages)
            lease.pages = array("i", pages)
            lease.computed = len(pages) * self.page_size
        return lease.computed

    def suspend(self, lease: Lease, ids: IntArray) -> None:
        """The sequence stopped running: its whole pages go to the prefix cache, and the lease may be revoked."""
        self.settle(lease, ids)
        lease.is_running = False

    def grow(self, lease: Lease, tokens: int) -> None:
        """Room for the KV of `tokens` ids in all; evicts what it must. The scheduler has made sure that it can."""
        missing = self.pages_for(tokens) - len(lease.pages)
        if missing > 0:
            self._free(missing)
            lease.pages.extend(self.pool.take(missing))

    def settle(self, lease: Lease, ids: IntArray) -> None:
        """Put the lease's whole computed pages into the prefix cache. Costs what is new since the last time."""
        whole = lease.computed // self.page_size
        if whole > lease.anchor.end:
            lease.anchor = self.tree.insert(lease.anchor, ids, lease.pages, whole)

    def fork(self, parent: Lease, tokens: int) -> tuple[Lease, tuple[int, int] | None]:
        """A new lease on the KV of the first `tokens` ids of `parent`, or what there is of it; its owner closes it.

        Whole pages are shared. The last, partly filled one is the parent's own: if a page can be had for it, the child
        gets a copy, and (source, target) is returned for the runner to copy at once.
        """
        child = self.open(parent.namespace)
        computed = min(tokens, parent.computed)
        whole, rest = divmod(computed, self.page_size)
        child.pages = parent.pages[:whole]
        self.pool.retain(child.pages)
        child.computed = whole * self.page_size
        if not rest or not self.num_available:
            return child, None
        self._free(1)
        child.pages.extend(self.pool.take(1))
        child.computed = computed
        return child, (parent.pages[whole], child.pages[whole])

    def revoke_idle(self) -> bool:
        """Revoke the least recently used idle lease that holds a page; False if there is none."""
        for lease in self._leases:
            if not lease.is_running and lease.pages:
                self.revoke(lease)
                return True
        return False

    def pages_for(self, tokens: int) -> int:
        """Pages that the KV of `tokens` ids takes."""
        return -(-tokens // self.page_size)

    def check(self, others: Iterable[Iterable[int]] = ()) -> None:
        """Raise `AssertionError` if a page is lost, held twice, or free and held. The end of every engine test."""
        self.tree.check()
        self.pool.check([*self._tables(), *others], self.tree.pages())
        for lease in self._leases:
            assert lease.computed <= len(lease.pages) * self.page_size, "a lease has KV without a page for it"
            assert lease.anchor.end <= len(lease.pages), "a lease is anchored beyond its pages"

    def _tables(self) -> Iterator[IntArray]:
        return (lease.pages for lease in self._leases)

    def _free(self, count: int) -> None:
        if count > self.pool.num_free:
            self.tree.evict(count - self.pool.num_free)
