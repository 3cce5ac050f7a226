"""The prefix cache: a radix tree over token ids, one root for each namespace.

A node is a run of whole pages; children differ in their first page. The tree holds one reference to each of its pages, so a
page with no other holder is evictable. Holders hold whole prefixes, so an evictable page has only evictable pages below it.
A match compares the ids themselves. A namespace is (policy version, adapter, salt): a version bump needs no flush.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from agentrt.core.tokens import IntArray
from agentrt.engine.kv.pages import PagePool


class Namespace(NamedTuple):
    """Whose KV: pages are matched only inside one. Fields are compared as fields, never joined into one string."""

    version: int
    adapter: str = ""
    salt: str = ""


class Node:
    """A run of pages below `parent`. `end` counts the pages from the root to the end of this run."""

    __slots__ = ("children", "end", "ids", "pages", "parent", "used")

    def __init__(self, parent: "Node | None", ids: IntArray, pages: list[int], used: int) -> None:
        self.parent, self.ids, self.pages, self.used = parent, ids, pages, used
        self.end: int = (parent.end if parent else 0) + len(pages)
        self.children: dict[bytes, Node] = {}

    @property
    def start(self) -> int:
        return self.end - len(self.pages)


class RadixTree:
    """Cached prefixes of whole pages over `pool`."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        self._roots: dict[Namespace, Node] = {}
        self._tick = 0

    def root(self, namespace: Namespace) -> Node:
        """Where every prefix of a namespace starts."""
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, IntArray("i"), [], 0)
        return self._roots[namespace]

    def match(self, namespace: Namespace, ids: IntArray, whole: int) -> tuple[Node, list[int]]:
        """The pages of the longest cached prefix of the first `whole` pages of `ids`, and the last node whole in it.

        The pages are not retained: the caller does that before anything else happens to the pool.
        """
        self._tick += 1
        node, pages = self.root(namespace), list[int]()
        while node.end < whole and (child := self._child(node, ids)) is not None:
            child.used = self._tick
            common = self._common_pages(child, ids, whole)
            pages += child.pages[:common]
            if common < len(child.pages):
                break
            node = child
        return node, pages

    def insert(self, anchor: Node, ids: IntArray, pages: IntArray, whole: int) -> Node:
        """Add the first `whole` pages of `ids`, whose KV lies in `pages`, below `anchor`, a node that they run through.

        `ids` and `pages` start at the root. Where the tree has a page for the same ids, that page takes the place of the
        one in `pages` (and of its reference). Returns the last node that lies in the prefix whole: the next anchor.
        """
        self._tick += 1
        node = anchor
        while node.end < whole:
            child = self._child(node, ids)
            if child is None:
                return self._add(node, ids, pages, whole)
            child.used = self._tick
            common = self._common_pages(child, ids, whole)
            self._share(child, common, pages)
            if common < len(child.pages):
                if child.start + common == whole:
                    return node
                child = self._split(child, common)
            node = child
        return node

    def evict(self, count: int) -> int:
        """Free up to `count` pages that nobody else holds: least recently used first, a tail before its head."""
        heap = [(node.used, id(node), node) for node in self._nodes() if self._is_evictable(node)]
        heapify(heap)
        freed = 0
        while heap and freed < count:
            _, _, node = heappop(heap)
            while node.pages and freed < count and self._pool.is_evictable(node.pages[-1]):
                self._pool.uncache(node.pages.pop())
                node.end -= 1
                freed += 1
            del node.ids[len(node.pages) * self._page_size :]
            if not node.pages:
                parent = self._unlink(node)
                if self._is_evictable(parent):
                    heappush(heap, (parent.used, id(parent), parent))
        return freed

    def pages(self) -> Iterator[int]:
        """Every page in the tree."""
        for node in self._nodes():
            yield from node.pages

    def check(self) -> None:
        """Raise `AssertionError` if the tree is not well formed."""
        for node in self._nodes():
            assert node.pages, "a node without pages"
            assert len(node.ids) == len(node.pages) * self._page_size, "ids and pages of a node differ in length"
            assert node.parent is not None
            assert node.parent.end == node.start, "a node does not start where its parent ends"
            assert node.parent.children[self._key(node.ids, 0)] is node, "a node is filed under another key"

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

    def _add(self, parent: Node, ids: IntArray, pages: IntArray, whole: int) -> Node:
        size, own = self._page_size, list(pages[parent.end : whole])
        node = Node(parent, ids[parent.end * size : whole * size], own, self._tick)
        self._pool.cache(own)
        parent.children[self._key(node.ids, 0)] = node
        return node

    def _share(self, node: Node, common: int, pages: IntArray) -> None:
        """Put the tree's own pages in the place of a lease's copies of them."""
        for index in range(common):
            ours, theirs = node.pages[index], pages[node.start + index]
            if ours != theirs:
                self._pool.retain((ours,))
                self._pool.release((theirs,))
                pages[node.start + index] = ours

    def _split(self, node: Node, at: int) -> Node:
        """Cut the first `at` pages off into a new node above; `node` itself stays the lower one, so anchors hold."""
        assert node.parent is not None
        upper = Node(node.parent, node.ids[: at * self._page_size], node.pages[:at], node.used)
        node.parent.children[self._key(upper.ids, 0)] = upper
        node.ids, node.pages, node.parent = node.ids[at * self._page_size :], node.pages[at:], upper
        upper.children[self._key(node.ids, 0)] = node
        return upper

    def _is_evictable(self, node: Node) -> bool:
        return bool(node.pages) and not node.children and self._pool.is_evictable(node.pages[-1])

    def _unlink(self, node: Node) -> Node:
        parent = node.parent
        assert parent is not None
        key = next(key for key, child in parent.children.items() if child is node)
        del parent.children[key]
        return parent
