"""Leases: what a session holds of the KV.

A lease is a page table and the number of ids whose KV lies in it. It is priced in nothing yet, but it is revocable: when a
page is needed and none is free or evictable, the least recently used idle lease is revoked. Its whole pages are in the
prefix cache by then, so a revoked conversation recomputes only what was evicted since.
"""

from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple

from agentrt.core.tokens import IntArray
from agentrt.engine.kv.group import Group
from agentrt.engine.kv.pages import NONE, PagePool, pages_of
from agentrt.engine.kv.radix import Namespace, Node, RadixTree


class Lease:
    """One session's pages. Only `KVCache` changes it."""

    __slots__ = ("anchor", "computed", "is_running", "namespace", "table")

    def __init__(self, namespace: Namespace, num_groups: int) -> None:
        self.namespace = namespace
        self.table: list[IntArray] = [array("i") for _ in range(num_groups)]
        """A row for each cache group, a page for each `page_size` ids; none where they are out of the group's window."""
        self.computed = 0
        """Ids whose KV lies in the pages, from the start."""
        self.anchor: Node | None = None
        """The last node of the prefix cache that lies whole in these pages."""
        self.is_running = False
        """A running lease is not revoked; the scheduler preempts its sequence first."""

    @property
    def pages(self) -> IntArray:
        """The pages of group 0, which has one at every place."""
        return self.table[0]


class PageCopy(NamedTuple):
    """A page of one group whose KV the runner is to copy to another."""

    group: int
    source: int
    target: int


class KVCache:
    """The page pools, the prefix cache over them, and every lease: all that decides which page holds what."""

    def __init__(self, groups: Sequence[Group], page_size: int) -> None:
        self.groups, self.page_size = groups, page_size
        self.pools = [PagePool(group.num_pages) for group in groups]
        self.tree = RadixTree(groups, self.pools, page_size)
        self._leases: dict[Lease, None] = {}  # in order of last use

    @property
    def pool(self) -> PagePool:
        """The pool of group 0. The scheduler counts its pages only: with those, the other groups have theirs."""
        return self.pools[0]

    @property
    def num_tokens(self) -> int:
        """Ids that fit."""
        return self.pool.num_pages * self.page_size

    def open(self, namespace: Namespace) -> Lease:
        """A new, empty lease; its owner closes it."""
        lease = Lease(namespace, len(self.groups))
        self._leases[lease] = None
        return lease

    def close(self, lease: Lease) -> None:
        """Give everything back. Closing twice does nothing."""
        if lease in self._leases:
            self.revoke(lease)
            del self._leases[lease]

    def revoke(self, lease: Lease) -> None:
        """Take the pages from a lease that stays open; what is in the prefix cache stays there, evictable."""
        for pool, row in zip(self.pools, lease.table, strict=True):
            pool.release(pages_of(row))
            del row[:]
        lease.computed, lease.anchor = 0, None

    def resume(self, lease: Lease, ids: IntArray, matchable: int) -> int:
        """Make a lease run again; an empty one takes the longest cached prefix of the first `matchable` of `ids`.

        Returns how many ids have their KV.
        """
        lease.is_running = True
        self._leases[lease] = self._leases.pop(lease)
        if not lease.pages:
            lease.anchor, table = self.tree.match(lease.namespace, ids, matchable // self.page_size)
            self._share(lease, table)
        return lease.computed

    def suspend(self, lease: Lease, ids: IntArray) -> None:
        """The sequence stopped running: its whole pages go to the prefix cache, and the lease may be revoked."""
        self.settle(lease, ids)
        lease.is_running = False

    def grow(self, lease: Lease, tokens: int) -> None:
        """Room for the KV of `tokens` ids in all; evicts what it must. The scheduler has made sure that it can."""
        missing = self.pages_for(tokens) - len(lease.pages)
        if missing > 0:
            for group, row in enumerate(lease.table):
                row.extend(self._take(group, missing))

    def advance(self, lease: Lease, ids: IntArray, count: int) -> None:
        """The KV of the next `count` of `ids` is in its pages. What fell out of a window goes to the prefix cache."""
        lease.computed += count
        if len(self.groups) > 1:
            self._leave_behind(lease, ids)

    def trim(self, lease: Lease) -> None:
        """Give back the pages beyond the computed ids: what a draft had that did not stand."""
        needed = self.pages_for(lease.computed)
        if len(lease.pages) > needed:
            for pool, row in zip(self.pools, lease.table, strict=True):
                pool.release(pages_of(row[needed:]))
                del row[needed:]

    def settle(self, lease: Lease, ids: IntArray) -> None:
        """Put the lease's whole computed pages into the prefix cache. Costs what is new since the last time."""
        whole = lease.computed // self.page_size
        if whole > (lease.anchor.end if lease.anchor else 0):
            lease.anchor = self.tree.insert(lease.namespace, lease.anchor, ids, lease.table, whole)

    def fork(self, parent: Lease, tokens: int) -> tuple[Lease, list[PageCopy]]:
        """A new lease on the KV of the first `tokens` ids of `parent`, or what there is of it; its owner closes it.

        Whole pages are shared. The last, partly filled one is the parent's own: if a page can be had for it, the child
        gets a copy, which the runner makes at once. Where the parent has moved on and dropped what was in a window
        then, the child starts empty, and takes from the prefix cache what is there when it first runs.
        """
        child = self.open(parent.namespace)
        computed = min(tokens, parent.computed)
        whole, rest = divmod(computed, self.page_size)
        if rest and not all(pool.num_available for pool in self.pools):
            computed, rest = whole * self.page_size, 0
        table = []
        for group, row in zip(self.groups, parent.table, strict=True):
            first = group.first_kept(computed) // self.page_size
            if NONE in row[first : self.pages_for(computed)]:
                return child, []
            table.append([NONE] * first + row[first:whole].tolist())
        self._share(child, table)
        if not rest:
            return child, []
        copies = [PageCopy(group, row[whole], *self._take(group, 1)) for group, row in enumerate(parent.table)]
        for copy in copies:
            child.table[copy.group].append(copy.target)
        child.computed = computed
        return child, copies

    def revoke_idle(self, spared: Collection[Lease] = ()) -> bool:
        """Revoke the least recently used idle lease that holds a page and is not `spared`; False if there is none."""
        for lease in self._leases:
            if not lease.is_running and lease.pages and lease not in spared:
                self.revoke(lease)
                return True
        return False

    def pages_for(self, tokens: int) -> int:
        """Pages of one group that the KV of `tokens` ids takes."""
        return -(-tokens // self.page_size)

    def check(self) -> None:
        """Raise `AssertionError` if a page is lost, held twice, or free and held. The end of every engine test."""
        self.tree.check()
        for index, pool in enumerate(self.pools):
            pool.check([pages_of(lease.table[index]) for lease in self._leases], self.tree.pages(index))
        for lease in self._leases:
            assert lease.computed <= len(lease.pages) * self.page_size, "a lease has KV without a page for it"
            assert lease.anchor is None or lease.anchor.end <= len(lease.pages), "a lease is anchored beyond its pages"
            for group, row in zip(self.groups, lease.table, strict=True):
                assert len(row) == len(lease.pages), "the rows of a table differ in length"
                start = group.first_kept(lease.computed) // self.page_size
                assert [page == NONE for page in row] == [place < start for place in range(len(row))], "a window is off"

    def _leave_behind(self, lease: Lease, ids: IntArray) -> None:
        for group, pool, row in zip(self.groups[1:], self.pools[1:], lease.table[1:], strict=True):
            place = group.first_kept(lease.computed) // self.page_size - 1
            if place >= 0 and row[place] != NONE:
                self.settle(lease, ids)
            while place >= 0 and row[place] != NONE:
                pool.release((row[place],))
                row[place] = NONE
                place -= 1

    def _share(self, lease: Lease, table: Sequence[Sequence[int]]) -> None:
        """Give an empty lease these whole pages, which somebody holds already."""
        for pool, row in zip(self.pools, table, strict=True):
            pool.retain(pages_of(row))
        lease.table = [array("i", row) for row in table]
        lease.computed = len(lease.pages) * self.page_size

    def _take(self, group: int, count: int) -> list[int]:
        """Free pages of a group; evicts what it must. For a window, which no plan counts, it revokes idle leases too."""
        pool = self.pools[group]
        lacking = count - pool.num_free
        if lacking > 0 and group == 0:
            self.tree.evict(lacking)
        elif lacking > 0:
            while pool.num_available < count and self.revoke_idle():
                pass
            # A sixteenth of the pool at once, for the search goes through the whole tree.
            self.tree.evict_window(group, max(count - pool.num_free, pool.num_pages // 16))
        return pool.take(count)
