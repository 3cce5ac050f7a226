"""The prefix cache: a radix tree over token ids, one root for each namespace.

A node is a run of whole pages; children differ in their first page. The tree holds one reference to each of its pages, so a
page with no other holder is evictable. Holders hold whole prefixes of group 0, so an evictable page of it has only evictable
pages below it, and makes way from the tail. A group with a window may lack any page: it makes way wherever it stands.
A match compares the ids themselves. A namespace is (policy version, adapter, salt): a version bump needs no flush.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from agentrt.core.tokens import IntArray
from agentrt.engine.kv.group import Group
from agentrt.engine.kv.pages import NONE, PagePool, pages_of


class Namespace(NamedTuple):
    """Whose KV: pages are matched only inside one. Fields are compared as fields, never joined into one string."""

    version: int
    adapter: str = ""
    salt: str = ""


class Node:
    """A run of pages below `parent`. `end` counts the places from the root to the end of this run."""

    __slots__ = ("children", "end", "ids", "parent", "table", "used")

    def __init__(self, parent: "Node | None", ids: IntArray, table: Sequence[list[int]], used: int) -> None:
        self.parent, self.ids, self.table, self.used = parent, ids, table, used
        self.end: int = (parent.end if parent else 0) + len(table[0])
        self.children: dict[bytes, Node] = {}

    @property
    def pages(self) -> list[int]:
        """The pages of group 0, which has one at every place."""
        return self.table[0]

    @property
    def start(self) -> int:
        return self.end - len(self.pages)


class RadixTree:
    """Cached prefixes of whole pages over a pool for each group."""

    def __init__(self, groups: Sequence[Group], pools: Sequence[PagePool], page_size: int) -> None:
        self._groups, self._pools, self._page_size = groups, pools, page_size
        self._roots: dict[Namespace, Node] = {}
        self._tick = 0

    def match(self, namespace: Namespace, ids: IntArray, whole: int) -> tuple[Node | None, list[list[int]]]:
        """The table of the longest cached prefix of the first `whole` pages of `ids`, and the last node whole in it, if any.

        The pages are not retained: the caller does that before anything else happens to the pools.
        """
        self._tick += 1
        node, table = self._roots.get(namespace), [list[int]() for _ in self._groups]
        if node is None:
            return None, table
        while node.end < whole and (child := self._child(node, ids)) is not None:
            child.used = self._tick
            common = self._common_pages(child, ids, whole)
            for row, own in zip(table, child.table, strict=True):
                row += own[:common]
            if common < len(child.pages):
                break
            node = child
        if len(table) > 1:
            node = self._cut_to_windows(node, table)
        return node if node.parent else None, table

    def insert(
        self, namespace: Namespace, anchor: Node | None, ids: IntArray, table: Sequence[IntArray], whole: int
    ) -> Node | None:
        """Add the first `whole` pages of `ids`, whose KV lies in `table`. They run through `anchor`, if it is given.

        `ids` and `table` start at the root. Where the tree has a page for the same ids, that page takes the place of the
        one in `table` (and of its reference). Returns the last node that lies in the prefix whole, if any: the next
        anchor.
        """
        self._tick += 1
        node = anchor or self._root(namespace)
        while node.end < whole:
            child = self._child(node, ids)
            if child is None:
                return self._add(node, ids, table, whole)
            child.used = self._tick
            common = self._common_pages(child, ids, whole)
            self._share(child, common, table)
            if common < len(child.pages):
                if child.start + common == whole:
                    break
                child = self._split(child, common)
            node = child
        return node if node.parent else None

    def evict(self, count: int) -> int:
        """Free up to `count` pages of group 0 that nobody else holds: least recently used first, a tail before its head.

        What other groups have at the same places goes with them.
        """
        heap = [(node.used, id(node), node) for node in self._nodes() if self._is_evictable(node)]
        heapify(heap)
        freed = 0
        while heap and freed < count:
            _, _, node = heappop(heap)
            key = self._key(node.ids, 0)
            while node.pages and freed < count and self._pools[0].is_evictable(node.pages[-1]):
                for pool, row in zip(self._pools, node.table, strict=True):
                    if (page := row.pop()) != NONE:
                        pool.uncache(page)
                node.end -= 1
                freed += 1
            del node.ids[len(node.pages) * self._page_size :]
            if not node.pages:
                parent = node.parent
                assert parent is not None
                del parent.children[key]
                if self._is_evictable(parent):
                    heappush(heap, (parent.used, id(parent), parent))
        self._roots = {namespace: root for namespace, root in self._roots.items() if root.children}
        return freed

    def evict_window(self, group: int, count: int) -> int:
        """Free up to `count` pages of a group with a window that nobody else holds, least recently used first.

        The windows before the ends of nodes go last: there, sequences parted or ended, and most likely go on.
        """
        pool, freed = self._pools[group], 0
        for row, place in self._in_order_of_worth(group):
            if freed == count:
                break
            if row[place] != NONE and pool.is_evictable(row[place]):
                pool.uncache(row[place])
                row[place] = NONE
                freed += 1
        return freed

    def pages(self, group: int = 0) -> Iterator[int]:
        """Every page of a group in the tree."""
        for node in self._nodes():
            yield from pages_of(node.table[group])

    def check(self) -> None:
        """Raise `AssertionError` if the tree is not well formed."""
        for node in self._nodes():
            assert node.pages, "a node without pages"
            assert NONE not in node.pages, "a place without a page of group 0"
            assert len({len(row) for row in node.table}) == 1, "the rows of a node differ in length"
            assert len(node.ids) == len(node.pages) * self._page_size, "ids and pages of a node differ in length"
            assert node.parent is not None
            assert node.parent.end == node.start, "a node does not start where its parent ends"
            assert node.parent.children[self._key(node.ids, 0)] is node, "a node is filed under another key"

    def _root(self, namespace: Namespace) -> Node:
        """Where every prefix of a namespace starts. Nobody else keeps it, so it can go with its last child."""
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, IntArray("i"), [[] for _ in self._groups], 0)
        return self._roots[namespace]

    def _nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _key(self, ids: IntArray, page: int) -> bytes:
        return ids[page * self._page_size : (page + 1) * self._page_size].tobytes()

    def _child(self, node: Node, ids: IntArray) -> Node | None:
        return node.children.get(self._key(ids, node.end))

    def _common_pages(self, node: Node, ids: IntArray, whole: int) -> int:
        """How many of the node's pages hold the ids that `ids` has at their place, within its first `whole` pages."""
        size, start = self._page_size, node.start * self._page_size
        limit = min(len(node.pages), whole - node.start)
        if ids[start : start + limit * size] == node.ids[: limit * size]:
            return limit
        return next(
            page for page in range(limit)
            if node.ids[page * size : (page + 1) * size] != ids[start + page * size : start + (page + 1) * size]
        )  # fmt: skip

    def _cut_to_windows(self, node: Node, table: list[list[int]]) -> Node:
        """Cut a match to the longest prefix whose windows are all there, and drop what lies before its windows.

        A page that is missing in the window of a prefix is in the windows of all prefixes down to the one that ends
        before it.
        """
        length = len(table[0])
        windows = list(zip(self._groups[1:], table[1:], strict=True))
        while (gap := max(self._last_gap(group, row, length) for group, row in windows)) >= 0:
            length = gap
        for group, row in zip(self._groups, table, strict=True):
            first = self._first_kept(group, length)
            row[:] = [NONE] * first + row[first:length]
        while node.parent is not None and node.end > length:
            node = node.parent
        return node

    def _last_gap(self, group: Group, row: list[int], length: int) -> int:
        """The last place without a page that a prefix of `length` pages needs; -1 if it has all."""
        needed = range(length - 1, self._first_kept(group, length) - 1, -1)
        return next((place for place in needed if row[place] == NONE), -1)

    def _first_kept(self, group: Group, length: int) -> int:
        """The place of the first page that a prefix of `length` whole pages needs."""
        return group.first_kept(length * self._page_size) // self._page_size

    def _in_order_of_worth(self, group: int) -> Iterator[tuple[list[int], int]]:
        """Every place of a group, as a row and an index into it; the least worth first."""
        nodes = sorted(self._nodes(), key=lambda node: node.used)
        # From one place before the end: a prompt's last id is always computed, so it is matched without its last page.
        ends = [max(0, self._first_kept(self._groups[group], node.end - 1) - node.start) for node in nodes]
        for node, end in zip(nodes, ends, strict=True):
            yield from ((node.table[group], place) for place in range(min(end, len(node.pages))))
        for node, end in zip(nodes, ends, strict=True):
            yield from ((node.table[group], place) for place in range(end, len(node.pages)))

    def _add(self, parent: Node, ids: IntArray, table: Sequence[IntArray], whole: int) -> Node:
        size, own = self._page_size, [list(row[parent.end : whole]) for row in table]
        node = Node(parent, ids[parent.end * size : whole * size], own, self._tick)
        for pool, row in zip(self._pools, own, strict=True):
            pool.cache(pages_of(row))
        parent.children[self._key(node.ids, 0)] = node
        return node

    def _share(self, node: Node, common: int, table: Sequence[IntArray]) -> None:
        """Put the tree's own pages in the place of a lease's copies of them, and the lease's where the tree has none."""
        for pool, own, row in zip(self._pools, node.table, table, strict=True):
            for index in range(common):
                ours, theirs = own[index], row[node.start + index]
                if ours == theirs or theirs == NONE:
                    continue
                if ours == NONE:
                    pool.cache((theirs,))
                    own[index] = theirs
                else:
                    pool.retain((ours,))
                    pool.release((theirs,))
                    row[node.start + index] = ours

    def _split(self, node: Node, at: int) -> Node:
        """Cut the first `at` pages off into a new node above; `node` itself stays the lower one, so anchors hold."""
        assert node.parent is not None
        upper = Node(node.parent, node.ids[: at * self._page_size], [row[:at] for row in node.table], node.used)
        node.parent.children[self._key(upper.ids, 0)] = upper
        node.ids, node.table, node.parent = node.ids[at * self._page_size :], [row[at:] for row in node.table], upper
        upper.children[self._key(node.ids, 0)] = node
        return upper

    def _is_evictable(self, node: Node) -> bool:
        return bool(node.pages) and not node.children and self._pools[0].is_evictable(node.pages[-1])
