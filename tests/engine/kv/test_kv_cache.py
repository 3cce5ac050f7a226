"""Pages, the radix tree and leases together: nothing is lost, nothing is shared that should not be."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from agentrt.core.tokens import Ids
from agentrt.engine.kv.lease import KVCache, Lease
from agentrt.engine.kv.pages import OutOfPagesError, PagePool
from agentrt.engine.kv.radix import Namespace

HERE = Namespace(0)


def compute(cache: KVCache, lease: Lease, ids: Ids) -> int:
    """What an engine does with a prompt: resume, grow, compute, suspend. Returns how many ids were cached."""
    cached = cache.resume(lease, ids, len(ids) - 1)
    cache.grow(lease, len(ids))
    lease.computed = len(ids)
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
    cache = KVCache(64, 16)
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
    assert cache.tree.evict(64) == 3
    assert cache.pool.num_free == 64
    cache.check()


def test_a_match_leaves_the_last_id_to_compute() -> None:
    cache = KVCache(8, 4)
    compute(cache, cache.open(HERE), Ids(range(8)))
    assert cache.resume(cache.open(HERE), Ids(range(8)), 7) == 4
    assert cache.resume(cache.open(HERE), Ids(range(9)), 8) == 8


@pytest.mark.parametrize("other", [Namespace(1), Namespace(0, adapter="S"), Namespace(0, salt="S")])
def test_c38_namespaces_never_mix(other: Namespace) -> None:
    """C38b: the same ids under another version, adapter or salt; adapter `S` is not salt `S`."""
    cache = KVCache(32, 4)
    compute(cache, cache.open(Namespace(0, adapter="S")), Ids(range(16)))
    expected = 12 if other == Namespace(0, adapter="S") else 0
    assert compute(cache, cache.open(other), Ids(range(16))) == expected


def test_c38_a_recycled_page_is_not_found_again() -> None:
    """C38c: X's pages go to Y; X asked again has nothing cached."""
    cache = KVCache(4, 4)
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
    cache = KVCache(16, 4)
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
    cache = KVCache(16, 4)
    parent = cache.open(HERE)
    compute(cache, parent, Ids(range(10)))
    child, copy = cache.fork(parent, 10)
    assert copy == (parent.pages[2], child.pages[2])
    assert child.pages[:2] == parent.pages[:2]
    assert child.computed == 10
    early, copy = cache.fork(parent, 5)
    assert (early.computed, copy) == (5, (parent.pages[1], early.pages[1]))
    cache.check()


def test_a_full_pool_forks_without_the_partial_page() -> None:
    cache = KVCache(3, 4)
    parent = cache.open(HERE)
    compute(cache, parent, Ids(range(10)))
    child, copy = cache.fork(parent, 10)
    assert (child.computed, copy) == (8, None)
    cache.check()


def test_eviction_takes_the_least_recently_used_and_a_tail_before_its_head() -> None:
    cache = KVCache(8, 4)
    old, new = Ids(range(16)), Ids(range(100, 116))
    for ids in (old, new):
        lease = cache.open(HERE)
        compute(cache, lease, ids)
        cache.close(lease)
    cache.tree.evict(3)
    assert len(cache.tree.match(HERE, old, 4)[1]) == 1
    assert len(cache.tree.match(HERE, new, 4)[1]) == 4
    cache.check()


class CacheMachine(RuleBasedStateMachine):
    """Sessions over a small alphabet, so that prefixes collide; a plain dict says what each page must hold."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(24, 2)
        self.ids: dict[Lease, Ids] = {}
        self.holds: dict[int, tuple[int, ...]] = {}

    def write(self, lease: Lease, start: int) -> None:
        """The runner's part: computing ids `start..` of a lease writes its pages."""
        for page in range(start // 2, len(lease.pages)):
            self.holds[lease.pages[page]] = tuple(self.ids[lease][: min(2 * page + 2, lease.computed)])

    @rule(target=leases, version=st.integers(0, 1))
    def open(self, version: int) -> Lease:
        lease = self.cache.open(Namespace(version))
        self.ids[lease] = Ids()
        return lease

    @rule(lease=leases, more=st.lists(st.integers(0, 1), min_size=1, max_size=7))
    def turn(self, lease: Lease, more: list[int]) -> None:
        ids = self.ids[lease]
        if len(ids) + len(more) > 20:
            return
        ids.extend(more)
        start = self.cache.resume(lease, ids, len(ids) - 1)
        while self.cache.pages_for(len(ids)) - len(lease.pages) > self.cache.num_available:
            assert self.cache.revoke_idle()
        self.cache.grow(lease, len(ids))
        lease.computed = len(ids)
        self.write(lease, start)
        self.cache.suspend(lease, ids)

    @rule(target=leases, parent=leases, share=st.floats(0, 1))
    def fork(self, parent: Lease, share: float) -> Lease:
        at = round(share * len(self.ids[parent]))
        child, copy = self.cache.fork(parent, at)
        self.ids[child] = Ids(self.ids[parent][:at])
        if copy:
            self.holds[copy[1]] = tuple(self.ids[child][: child.computed])
        return child

    @rule(lease=consumes(leases))
    def close(self, lease: Lease) -> None:
        self.cache.close(lease)
        del self.ids[lease]

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        self.cache.tree.evict(count)

    @rule()
    def revoke(self) -> None:
        self.cache.revoke_idle()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.cache.check()

    @invariant()
    def every_page_holds_its_lease_s_ids(self) -> None:
        for lease, ids in self.ids.items():
            for page in range(lease.computed // 2):
                assert self.holds[lease.pages[page]] == tuple(ids[: 2 * page + 2])

    def teardown(self) -> None:
        for lease in list(self.ids):
            self.cache.close(lease)
        self.cache.tree.evict(24)
        assert self.cache.pool.num_free == 24
        self.cache.check()


CacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestCacheMachine = CacheMachine.TestCase
