"""The page pool of a cache group on one tier: which pages are free, and how many hold each of the others.

Pure bookkeeping over page numbers; the KV itself lies in the runner's flat buffers. A page is held by page tables (leases),
by the prefix cache and by copies in flight, one reference each. A page that only the prefix cache holds is *evictable*.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

NONE = -1
"""Stands in a table where there is no page."""
AWAY = -2
"""A page of the host stands as `AWAY - page` in a table beside pages of the device: below `NONE`."""


class PageCopy(NamedTuple):
    """A page of one group whose KV is to be copied to another. The tiers of both follow from who is asked to do it."""

    group: int
    source: int
    target: int


class PageCopies(NamedTuple):
    """Pages of one group whose KV is to be copied to as many others."""

    group: int
    sources: list[int]
    targets: list[int]


def singly(copies: Iterable[PageCopies]) -> list[PageCopy]:
    """Each copy by itself."""
    return [PageCopy(group, *ends) for group, *both in copies for ends in zip(*both, strict=True)]


def pages_of(table: Iterable[int]) -> list[int]:
    """The pages of the device in a table."""
    return [page for page in table if page > NONE]


class OutOfPagesError(Exception):
    """More pages were asked for than are free. The scheduler plans so that this is never raised."""


class PagePool:
    """Reference counts of `num_pages` pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = array("i", [0]) * num_pages
        self.generations = array("q", [0]) * num_pages
        """How often each page was taken: a copy that finds another number here has the wrong page."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached = bytearray(num_pages)
        self.num_evictable = 0

    def __repr__(self) -> str:
        return f"<PagePool {self.num_free} free, {self.num_evictable} evictable of {self.num_pages}>"

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that are free or become so by evicting what nobody holds."""
        return len(self._free) + self.num_evictable

    def take(self, count: int) -> list[int]:
        """`count` free pages, each with one reference, the caller's. Raises `OutOfPagesError`, taking none."""
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
        refs, generations = self.refs, self.generations
        pages = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        for page in pages:
            refs[page] = 1
            generations[page] += 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to each of these pages, which somebody holds already."""
        refs, cached = self.refs, self._cached
        for page in pages:
            count = refs[page]
            assert count > 0, f"page {page} is free and cannot be retained"
            refs[page] = count + 1
            if count == 1 and cached[page]:
                self.num_evictable -= 1

    def release(self, pages: Iterable[int]) -> None:
        """Give back one reference to each of these pages; a page without any is free."""
        refs, cached = self.refs, self._cached
        for page in pages:
            count = refs[page]
            assert count > 0, f"page {page} was released more often than it was held"
            refs[page] = count - 1
            if count == 1:
                self._free.append(page)
            elif count == 2 and cached[page]:
                self.num_evictable += 1

    def cache(self, pages: Iterable[int]) -> None:
        """The prefix cache takes its reference to each of these pages, which a lease holds."""
        pages = list(pages)
        self.retain(pages)
        for page in pages:
            assert not self._cached[page], f"page {page} is in the prefix cache already"
            self._cached[page] = 1

    def uncache(self, pages: Iterable[int]) -> None:
        """The prefix cache gives up pages that nobody else holds; they are free then."""
        refs, cached, before = self.refs, self._cached, len(self._free)
        for page in pages:
            assert refs[page] == cached[page] == 1, f"page {page} is still held"
            cached[page] = refs[page] = 0
            self._free.append(page)
        self.num_evictable -= len(self._free) - before

    def is_evictable(self, page: int) -> bool:
        return bool(self._cached[page]) and self.refs[page] == 1

    def count_evictable(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody but the prefix cache holds."""
        refs, cached = self.refs, self._cached
        return len([page for page in pages if refs[page] == 1 and cached[page]])

    def check(self, tables: Iterable[Iterable[int]], tree: Iterable[int], copies: Iterable[int] = ()) -> None:
        """Raise `AssertionError` unless a page is free, or held just as often as `tables`, `tree` and `copies` hold it."""
        held = Counter(tree)
        assert all(count == 1 for count in held.values()), "a page is twice in the prefix cache"
        assert {page for page in range(self.num_pages) if self._cached[page]} == set(held), "cached marks are off"
        for table in tables:
            pages = list(table)
            assert len(set(pages)) == len(pages), "a page is twice in one page table"
            held.update(pages)
        held.update(copies)
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert not free & set(held), "a page is both free and held"
        for page in range(self.num_pages):
            assert self.refs[page] == held[page], f"page {page} has {self.refs[page]} references, {held[page]} holders"
        assert len(free) + len(held) == self.num_pages, "a page was lost"
        evictable = sum(self.is_evictable(page) for page in range(self.num_pages))
        assert evictable == self.num_evictable, "the count of evictable pages is off"
