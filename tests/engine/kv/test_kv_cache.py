"""Pages, the radix tree and leases together: nothing is lost, nothing is shared that should not be."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from agentrt.core.tokens import Ids
from agentrt.engine.kv.cache import KVCache
from agentrt.engine.kv.evict import evict, evict_window
from agentrt.engine.kv.group import Group
from agentrt.engine.kv.lease import Lease
from agentrt.engine.kv.pages import NONE, OutOfPagesError, PageCopy, PagePool
from agentrt.engine.kv.radix import Namespace

HERE = Namespace(0)


def compute(cache: KVCache, lease: Lease, ids: Ids) -> int:
    """What an engine does with a prompt: resume, grow, compute, suspend. Returns how many ids were cached."""
    cached = cache.resume(lease, ids, len(ids) - 1)
    cache.grow(lease, len(ids))
    cache.advance(lease, ids, len(ids) - cached)
    cache.suspend(lease, ids)
    return cached


def test_take_more_than_there_is_takes_nothing() -> None:
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(OutOfPagesError, match="2 pages asked for, 1 of 3 free"):
        pool.take(2)
    assert pool.num_free == 1


def test_c39_a_split_keeps_count() -> None:
    """C39, second input: ids 1..32, then 1..16 and 99..114: three pages of 16 in the tree, none counted twice."""
    cache = KVCache([Group(64)], 16)
    first, second = cache.open(HERE), cache.open(HERE)
    assert compute(cache, first, Ids(range(1, 33))) == 0
    assert compute(cache, second, Ids([*range(1, 17), *range(99, 115)])) == 16
    assert len(list(cache.tree.pages())) == 3
    cache.check()
    held = len(set(first.pages) | set(second.pages))
    assert (held, cache.pool.num_evictable, cache.pool.num_free) == (3, 0, 61)
    cache.close(first)
    cache.close(second)
    assert (cache.pool.num_evictable, cache.pool.num_free) == (3, 61)
    assert evict(cache.tree, 64) == 3
    assert cache.pool.num_free == 64
    cache.check()


def test_a_match_leaves_the_last_id_to_compute() -> None:
    cache = KVCache([Group(8)], 4)
    compute(cache, cache.open(HERE), Ids(range(8)))
    assert cache.resume(cache.open(HERE), Ids(range(8)), 7) == 4
    assert cache.resume(cache.open(HERE), Ids(range(9)), 8) == 8


def test_c38_prompts_that_differ_in_their_first_id() -> None:
    """C38a in what applies: there is no hash to replace by a constant, for the keys of the tree are the ids themselves."""
    cache = KVCache([Group(32)], 16)
    assert compute(cache, cache.open(HERE), Ids([1, *range(63)])) == 0
    assert compute(cache, cache.open(HERE), Ids([2, *range(63)])) == 0
    assert compute(cache, cache.open(HERE), Ids([1, *range(63)])) == 48


@pytest.mark.parametrize("other", [Namespace(1), Namespace(0, adapter="S"), Namespace(0, salt="S")])
def test_c38_and_row_5_namespaces_never_mix(other: Namespace) -> None:
    """C38b: the same ids under another version, adapter or salt; adapter `S` is not salt `S`."""
    cache = KVCache([Group(32)], 4)
    compute(cache, cache.open(Namespace(0, adapter="S")), Ids(range(16)))
    expected = 12 if other == Namespace(0, adapter="S") else 0
    assert compute(cache, cache.open(other), Ids(range(16))) == expected


def test_c38_a_recycled_page_is_not_found_again() -> None:
    """C38c: X's pages go to Y; X asked again has nothing cached."""
    cache = KVCache([Group(4)], 4)
    x, y = Ids(range(16)), Ids(range(100, 116))
    lease = cache.open(HERE)
    compute(cache, lease, x)
    cache.close(lease)
    lease = cache.open(HERE)
    assert compute(cache, lease, y) == 0
    cache.close(lease)
    assert compute(cache, cache.open(HERE), x) == 0
    cache.check()


def test_equal_prompts_computed_apart_end_up_on_the_same_pages() -> None:
    cache = KVCache([Group(16)], 4)
    first, second = cache.open(HERE), cache.open(HERE)
    ids = Ids(range(10))
    for lease in (first, second):
        cache.resume(lease, ids, 9)
        cache.grow(lease, 10)
        lease.computed = 10
    cache.suspend(first, ids)
    cache.suspend(second, ids)
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    assert cache.pool.num_free == 16 - 4
    cache.check()


def test_a_fork_shares_whole_pages_and_copies_the_partial_one() -> None:
    cache = KVCache([Group(16)], 4)
    parent = cache.open(HERE)
    compute(cache, parent, Ids(range(10)))
    child, copies = cache.fork(parent, 10)
    assert copies == [PageCopy(0, parent.pages[2], child.pages[2])]
    assert child.pages[:2] == parent.pages[:2]
    assert child.computed == 10
    early, copies = cache.fork(parent, 5)
    assert (early.computed, copies) == (5, [PageCopy(0, parent.pages[1], early.pages[1])])
    cache.check()


def test_a_full_pool_forks_without_the_partial_page() -> None:
    cache = KVCache([Group(3)], 4)
    parent = cache.open(HERE)
    compute(cache, parent, Ids(range(10)))
    child, copies = cache.fork(parent, 10)
    assert (child.computed, copies) == (8, [])
    cache.check()


def test_eviction_takes_the_least_recently_used_and_a_tail_before_its_head() -> None:
    cache = KVCache([Group(8)], 4)
    old, new = Ids(range(16)), Ids(range(100, 116))
    for ids in (old, new):
        lease = cache.open(HERE)
        compute(cache, lease, ids)
        cache.close(lease)
    evict(cache.tree, 3)
    assert len(cache.tree.match(HERE, old, 4)[1][0]) == 1
    assert len(cache.tree.match(HERE, new, 4)[1][0]) == 4
    cache.check()


class CacheMachine(RuleBasedStateMachine):
    """Sessions over a small alphabet, so that prefixes collide; a plain dict says what each page must hold."""

    leases = Bundle("leases")
    groups: tuple[Group, ...] = (Group(24),)

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(self.groups, 2)
        self.ids: dict[Lease, Ids] = {}
        self.holds: dict[tuple[int, int], tuple[int, ...]] = {}
        """By group and page, the ids up to and with those in it."""

    def write(self, lease: Lease, start: int) -> None:
        """The runner's part: computing ids `start..` of a lease writes its pages."""
        for group, row in enumerate(lease.table):
            for place in range(start // 2, len(row)):
                self.holds[group, row[place]] = tuple(self.ids[lease][: 2 * place + 2])

    @rule(target=leases, version=st.integers(0, 1))
    def open(self, version: int) -> Lease:
        lease = self.cache.open(Namespace(version))
        self.ids[lease] = Ids()
        return lease

    @rule(lease=leases, more=st.lists(st.integers(0, 1), min_size=1, max_size=7), chunk=st.integers(1, 7))
    def turn(self, lease: Lease, more: list[int], chunk: int) -> None:
        ids = self.ids[lease]
        if len(ids) + len(more) > 20:
            return
        ids.extend(more)
        start = self.cache.resume(lease, ids, len(ids) - 1)
        while self.cache.pages_for(len(ids)) - len(lease.pages) > self.cache.pool.num_available:
            assert self.cache.revoke_idle()
        for at in range(start, len(ids), chunk):
            count = min(chunk, len(ids) - at)
            self.cache.grow(lease, at + count)
            self.write(lease, at)
            self.cache.advance(lease, ids, count)
        self.cache.suspend(lease, ids)

    @rule(target=leases, parent=leases, share=st.floats(0, 1))
    def fork(self, parent: Lease, share: float) -> Lease:
        at = round(share * len(self.ids[parent]))
        child, copies = self.cache.fork(parent, at)
        self.ids[child] = Ids(self.ids[parent][:at])
        for group, source, target in copies:
            self.holds[group, target] = self.holds[group, source]
        return child

    @rule(lease=consumes(leases))
    def close(self, lease: Lease) -> None:
        self.cache.close(lease)
        del self.ids[lease]

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        evict(self.cache.tree, count)

    @rule(count=st.integers(1, 4))
    def evict_window(self, count: int) -> None:
        for group in range(1, len(self.groups)):
            evict_window(self.cache.tree, group, count)

    @rule()
    def revoke(self) -> None:
        self.cache.revoke_idle()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.cache.check()

    @invariant()
    def every_page_holds_its_lease_s_ids(self) -> None:
        for lease, ids in self.ids.items():
            for group, row in enumerate(lease.table):
                for place in range(lease.computed // 2):
                    if row[place] != NONE:
                        assert self.holds[group, row[place]][: 2 * place + 2] == tuple(ids[: 2 * place + 2])

    def teardown(self) -> None:
        for lease in list(self.ids):
            self.cache.close(lease)
        evict(self.cache.tree, 24)
        for pool in self.cache.pools:
            assert pool.num_free == pool.num_pages
        self.cache.check()


class WindowMachine(CacheMachine):
    """Two windows besides; the second has just the pages that one running sequence can need."""

    groups = (Group(24), Group(24, 3), Group(8, 5))


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
WindowMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30)
TestCacheMachine = CacheMachine.TestCase
TestWindowMachine = WindowMachine.TestCase
