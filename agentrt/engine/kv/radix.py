"""The prefix cache: a radix tree over token ids, one root for each namespace, over pages of two tiers.

A node is a run of whole pages; children differ in their first page. At each of its places a node has a page of the device,
one of the host, or both, for every cache group; the tree holds one reference to each. A page with no other holder is
evictable. Of group 0 pages make way from the tail of a branch, on either tier, so what is left of it is a prefix. A group
with a window may lack any page. A match compares the ids themselves. A namespace is (policy version, adapter, salt): a
version bump needs no flush, and a page of the host is found only in the namespace that it was saved from.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from agentrt.core.tokens import IntArray
from agentrt.engine.kv.group import Group
from agentrt.engine.kv.pages import AWAY, NONE, PagePool

Rows = list[list[int]]
"""A row of pages for each cache group."""
DEVICE, HOST = 0, 1
"""The tiers."""


class Namespace(NamedTuple):
    """Whose KV: pages are matched only inside one. Fields are compared as fields, never joined into one string."""

    version: int
    adapter: str = ""
    salt: str = ""


class Node:
    """A run of pages below `parent`. Its places, counted from the root, go from `start` to `end`."""

    __slots__ = ("children", "end", "ids", "parent", "start", "tables", "used", "users")

    def __init__(self, parent: "Node | None", ids: IntArray, tables: tuple[Rows, Rows], used: int, users: int) -> None:
        self.parent, self.ids, self.tables, self.used, self.users = parent, ids, tables, used, users
        self.start: int = parent.end if parent else 0
        self.end: int = self.start + len(tables[DEVICE][0])
        self.children: dict[bytes, Node] = {}

    @property
    def table(self) -> Rows:
        """Its pages on the device."""
        return self.tables[DEVICE]

    @property
    def length(self) -> int:
        """Its places."""
        return self.end - self.start

    def path(self) -> "list[Node]":
        """The nodes from the one below the root to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class RadixTree:
    """Cached prefixes of whole pages. `pools` has a pool for each group, on the device and on the host."""

    def __init__(
        self, groups: Sequence[Group], pools: tuple[Sequence[PagePool], Sequence[PagePool]], page_size: int
    ) -> None:
        self.groups, self.pools, self.page_size = groups, pools, page_size
        self._roots: dict[Namespace, Node] = {}
        self.resident: dict[Node, None] = {}
        """The nodes that have pages of group 0 on the device: all above them have some too."""
        self._tick = 0

    def match(self, namespace: Namespace, ids: IntArray, whole: int) -> tuple[Node | None, Rows]:
        """The table of the longest cached prefix of the first `whole` pages of `ids`, and the last node whole in it, if any.

        Where the device has no page the table has that of the host, as `AWAY` says. The pages are not retained: the
        caller does that before anything else happens to the pools.
        """
        self._tick += 1
        node, table = self._roots.get(namespace), [list[int]() for _ in self.groups]
        if node is None:
            return None, table
        while node.end < whole and (child := self._child(node, ids)) is not None:
            child.used = self._tick
            common = self._common_pages(child, ids, whole)
            for row, own, other in zip(table, *child.tables, strict=True):
                row += nearest(own, other, common)
            if common < child.length:
                break
            node = child
        node = self._cut_to_windows(node, table)
        return node if node.parent else None, table

    def table_of(self, anchor: Node) -> tuple[Node, Rows]:
        """As a match of all ids down to `anchor` would give it, without counting as a use."""
        path = anchor.path()
        table = [
            [
                page
                for node in path
                for page in nearest(node.tables[DEVICE][group], node.tables[HOST][group], node.length)
            ]
            for group in range(len(self.groups))
        ]
        return self._cut_to_windows(anchor, table), table

    def node_at(self, namespace: Namespace, node: Node | None, ids: IntArray, whole: int) -> Node:
        """The node that ends at the first `whole` pages of `ids`, which are in the tree and run through `node`."""
        node = node or self._roots[namespace]
        while node.end < whole:
            child = self._child(node, ids)
            assert child is not None
            node = self._split(child, whole - child.start) if child.end > whole else child
        return node

    def insert(
        self, namespace: Namespace, anchor: Node | None, ids: IntArray, table: Sequence[IntArray], whole: int
    ) -> Node | None:
        """Add the first `whole` pages of `ids`, whose KV lies in `table`. They run through `anchor`, if it is given.

        `ids` and `table` start at the root. Where the tree has a page for the same ids, that page takes the place of the
        one in `table` (and of its reference). Returns the node that ends at `whole`: the next anchor; None if it is 0. That
        is `anchor` itself, longer, where nobody but the caller's lease holds it: a conversation is one node, not one a turn.
        """
        self._tick += 1
        node = anchor or self._root(namespace)
        while node.end < whole:
            child = self._child(node, ids)
            if child is None:
                is_own = node is anchor and node.users == 1 and not node.children
                return self._extend(node, ids, table, whole) if is_own else self._add(node, ids, table, whole)
            child.used = self._tick
            common = self._common_pages(child, ids, whole)
            if common < child.length:
                child = self._split(child, common)
            self._share(child, table)
            node = child
        return node if node.parent else None

    def adopt(self, anchor: Node, table: Sequence[IntArray]) -> None:
        """The KV of all places down to `anchor` lies in `table`: as `insert`, without counting as a use."""
        for node in anchor.path():
            self._share(node, table)

    def hold(self, old: Node | None, new: Node | None) -> None:
        """A lease that was anchored at `old` is at `new` from now on. Anchored places stay: on the host, or as a hole."""
        node = new
        while node is not None and node is not old:
            node.users += 1
            node = node.parent
        if old is None or node is old:
            return
        node = old
        while node is not None:
            node.users -= 1
            node = node.parent
        self.trim(old)

    def trim(self, node: Node) -> None:
        """Drop the places at the end of a branch that have no page left, and the nodes that have no place left."""
        row = node.tables[DEVICE][0]
        if not row or row[0] == NONE:
            self.resident.pop(node, None)
        while node.parent is not None and node.length and not node.children and not node.users:
            key, parent = self._key(node.ids, 0), node.parent
            while node.length and node.tables[DEVICE][0][-1] == node.tables[HOST][0][-1] == NONE and self._pop(node):
                pass
            if node.length:
                break
            self.resident.pop(node, None)
            del parent.children[key]
            node = parent
        if node.parent is None and not node.children and not node.users:
            self._roots = {namespace: root for namespace, root in self._roots.items() if root is not node}

    def locate(self, node: Node, place: int) -> tuple[Node, int]:
        """Where a place that was below the start of `node` is now, after splits: the node, and the index into its rows."""
        while place < node.start:
            assert node.parent is not None
            node = node.parent
        return node, place - node.start

    def nodes(self) -> Iterator[Node]:
        """All nodes with pages, parents before their children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def pages(self, group: int = 0, tier: int = DEVICE) -> Iterator[int]:
        """Every page of a group in the tree."""
        for node in self.nodes():
            yield from (page for page in node.tables[tier][group] if page != NONE)

    def check(self) -> None:
        """Raise `AssertionError` if the tree is not well formed."""
        for node in self.nodes():
            rows = [row for table in node.tables for row in table]
            assert rows[0], "a node without places"
            assert {len(row) for row in rows} == {node.length}, "the rows of a node differ in length"
            assert node.children or node.users or any(row[-1] != NONE for row in rows), (
                "a branch ends with an empty place"
            )
            assert len(node.ids) == node.length * self.page_size, "ids and pages of a node differ in length"
            assert node.parent is not None
            assert node.parent.end == node.start, "a node does not start where its parent ends"
            assert node.parent.children[self._key(node.ids, 0)] is node, "a node is filed under another key"
            assert node.users >= sum(child.users for child in node.children.values()), "more users below than above"
        found = {node for node in self.nodes() if any(page != NONE for page in node.tables[DEVICE][0])}
        assert found == set(self.resident), "a node with pages on the device is not known as one, or one without is"
        for node in self.resident:
            assert node.tables[DEVICE][0][0] != NONE, "the pages on the device are no prefix of a node"
            assert node.start == 0 or node.parent in self.resident, "the pages on the device are no prefix of a branch"
        for root in self._roots.values():
            assert root.children or root.users, "a namespace without pages"

    def _root(self, namespace: Namespace) -> Node:
        """Where every prefix of a namespace starts. It goes with its last child."""
        if namespace not in self._roots:
            rows: tuple[Rows, Rows] = [[] for _ in self.groups], [[] for _ in self.groups]
            self._roots[namespace] = Node(None, IntArray("i"), rows, 0, 0)
        return self._roots[namespace]

    def _key(self, ids: IntArray, page: int) -> bytes:
        return ids[page * self.page_size : (page + 1) * self.page_size].tobytes()

    def _child(self, node: Node, ids: IntArray) -> Node | None:
        return node.children.get(self._key(ids, node.end))

    def _common_pages(self, node: Node, ids: IntArray, whole: int) -> int:
        """How many of the node's pages hold the ids that `ids` has at their place, within its first `whole` pages."""
        size, start = self.page_size, node.start * self.page_size
        limit = min(node.length, whole - node.start)
        if ids[start : start + limit * size] == node.ids[: limit * size]:
            return limit
        return next(
            page for page in range(limit)
            if node.ids[page * size : (page + 1) * size] != ids[start + page * size : start + (page + 1) * size]
        )  # fmt: skip

    def _cut_to_windows(self, node: Node, table: Rows) -> Node:
        """Cut a match to the longest prefix whose windows are all there, and drop what lies before its windows.

        A page that is missing in the window of a prefix is in the windows of all prefixes down to the one that ends
        before it.
        """
        length = table[0].index(NONE) if NONE in table[0] else len(table[0])
        windows = list(zip(self.groups[1:], table[1:], strict=True))
        while windows and (gap := max(self._last_gap(group, row, length) for group, row in windows)) >= 0:
            length = gap
        for group, row in zip(self.groups, table, strict=True):
            first = self.first_kept(group, length)
            row[:] = [NONE] * first + row[first:length]
        while node.parent is not None and node.end > length:
            node = node.parent
        return node

    def _last_gap(self, group: Group, row: list[int], length: int) -> int:
        """The last place without a page that a prefix of `length` pages needs; -1 if it has all."""
        needed = range(length - 1, self.first_kept(group, length) - 1, -1)
        return next((place for place in needed if row[place] == NONE), -1)

    def first_kept(self, group: Group, length: int) -> int:
        """The place of the first page that a prefix of `length` whole pages needs."""
        return group.first_kept(length * self.page_size) // self.page_size

    def _add(self, parent: Node, ids: IntArray, table: Sequence[IntArray], whole: int) -> Node:
        size, own = self.page_size, [list(row[parent.end : whole]) for row in table]
        blank = [[NONE] * len(row) for row in own]
        node = Node(parent, ids[parent.end * size : whole * size], (own, blank), self._tick, 0)
        for pool, row in zip(self.pools[DEVICE], own, strict=True):
            pool.cache(page for page in row if page != NONE)
        parent.children[self._key(node.ids, 0)] = node
        self.resident[node] = None
        return node

    def _extend(self, node: Node, ids: IntArray, table: Sequence[IntArray], whole: int) -> Node:
        for pool, own, blank, row in zip(self.pools[DEVICE], *node.tables, table, strict=True):
            new = row[node.end : whole].tolist()
            pool.cache(page for page in new if page != NONE)
            own += new
            blank += [NONE] * len(new)
        node.ids += ids[node.end * self.page_size : whole * self.page_size]
        node.end, node.used = whole, self._tick
        return node

    def _share(self, node: Node, table: Sequence[IntArray]) -> None:
        """Put the tree's own pages in the place of a lease's copies of them, and the lease's where the tree has none."""
        for pool, own, row in zip(self.pools[DEVICE], node.table, table, strict=True):
            there, new = row[node.start : node.end].tolist(), list[int]()
            if own == there:
                continue
            for index, (ours, theirs) in enumerate(zip(own, there, strict=True)):
                if ours == theirs or theirs == NONE:
                    continue
                if ours == NONE:
                    new.append(theirs)
                    own[index] = theirs
                else:
                    pool.retain((ours,))
                    pool.release((theirs,))
                    row[node.start + index] = ours
            if new:
                pool.cache(new)
                self.resident[node] = None

    def _split(self, node: Node, at: int) -> Node:
        """Cut the first `at` pages off into a new node above; `node` itself stays the lower one, so anchors hold."""
        assert node.parent is not None
        rows = [[row[:at] for row in table] for table in node.tables]
        upper = Node(node.parent, node.ids[: at * self.page_size], (rows[0], rows[1]), node.used, node.users)
        node.parent.children[self._key(upper.ids, 0)] = upper
        rows = [[row[at:] for row in table] for table in node.tables]
        node.ids, node.tables = node.ids[at * self.page_size :], (rows[0], rows[1])
        node.parent, node.start = upper, upper.end
        upper.children[self._key(node.ids, 0)] = node
        if node in self.resident:
            self.resident[upper] = None
            if node.tables[DEVICE][0][0] == NONE:
                del self.resident[node]
        return upper

    def _pop(self, node: Node) -> bool:
        """Drop the last place of a node, unless a page there is still held."""
        pools, rows = [*self.pools[DEVICE], *self.pools[HOST]], [*node.tables[DEVICE], *node.tables[HOST]]
        last = list(zip(pools, rows, strict=True))
        if any(row[-1] != NONE and not pool.is_evictable(row[-1]) for pool, row in last):
            return False
        for pool, row in last:
            if (page := row.pop()) != NONE:
                pool.uncache((page,))
        node.end -= 1
        del node.ids[node.length * self.page_size :]
        return True


def nearest(device: list[int], host: list[int], count: int) -> list[int]:
    """The first `count` pages of a node's row: those of the device, where it has none those of the host."""
    row = device[:count]
    if NONE not in row:
        return row
    return [AWAY - other if page == NONE else page for page, other in zip(row, host, strict=False)]
