"""Cache groups with windows, by number: what is kept, what is a hit, what makes way."""

import pytest

from agentrt.core.tokens import Ids
from agentrt.engine.kv.cache import KVCache
from agentrt.engine.kv.evict import evict, evict_window
from agentrt.engine.kv.group import Group
from agentrt.engine.kv.lease import Lease
from agentrt.engine.kv.pages import NONE, PageCopy
from agentrt.engine.kv.radix import Namespace

HERE = Namespace(0)
GLOBAL, LOCAL = 0, 1


def make_cache(*, window: int = 4, page_size: int = 2, pages: int = 32) -> KVCache:
    return KVCache([Group(pages), Group(pages, window)], page_size)


def compute(cache: KVCache, ids: Ids, lease: Lease | None = None) -> tuple[Lease, int]:
    """A prompt in one chunk. The lease, and how many ids were cached."""
    lease = lease or cache.open(HERE)
    cached = cache.resume(lease, ids, len(ids) - 1)
    cache.grow(lease, len(ids))
    cache.advance(lease, ids, len(ids) - cached)
    cache.suspend(lease, ids)
    cache.check()
    return lease, cached


def hit(cache: KVCache, length: int) -> int:
    """Of the ids 0..length, how many are cached."""
    lease, ids = cache.open(HERE), Ids(range(length + 1))
    cached = cache.resume(lease, ids, length)
    cache.suspend(lease, ids)
    return cached


def forget(cache: KVCache, place: int) -> None:
    """Take the page at a place of the only node from the local group."""
    (node,) = cache.tree.nodes()
    cache.pools[LOCAL].uncache((node.table[LOCAL][place],))
    node.table[LOCAL][place] = NONE


@pytest.mark.parametrize(("gone", "hits"), [((), 6), ((0,), 6), ((1,), 2), ((2,), 4), ((0, 1), 0), ((0, 2), 0)])
def test_c41_a_hit_is_the_smaller_of_the_two_groups(gone: tuple[int, ...], hits: int) -> None:
    """C41: prefix 0..5 in pages of 2, window 4. It needs the local pages of ids 2..5; the prefix 0..3 those of 0..3."""
    cache = make_cache()
    lease, _ = compute(cache, Ids(range(6)))
    cache.close(lease)
    for place in gone:
        forget(cache, place)
    assert hit(cache, 6) == hits
    cache.check()


@pytest.mark.parametrize(("length", "hits"), [(3, 2), (4, 4), (5, 4), (6, 6), (7, 6)])
def test_c41_a_global_layer_needs_all_of_it(length: int, hits: int) -> None:
    """C41: the tail of the prefix 0..5 was evicted from the global group, and with it from the local one."""
    cache = make_cache()
    lease, _ = compute(cache, Ids(range(6)))
    cache.close(lease)
    assert hit(cache, length) == hits
    for open_lease in list(cache._leases):
        cache.close(open_lease)
    assert evict(cache.tree, 1) == 1
    assert [pool.num_free for pool in cache.pools] == [30, 30]
    assert hit(cache, length) == min(hits, 4)


def test_a_hit_takes_only_the_windows_pages() -> None:
    cache = make_cache()
    compute(cache, Ids(range(12)))
    lease = cache.open(HERE)
    assert cache.resume(lease, Ids(range(20)), 19) == 12
    assert [page != NONE for page in lease.table[LOCAL]] == [False] * 4 + [True] * 2
    assert lease.table[GLOBAL].tolist().count(NONE) == 0


def test_a_page_is_held_until_its_last_id_falls_out_of_the_window() -> None:
    """Of the window before the end of the last whole page, from where a lease may have to go on."""
    cache, ids = make_cache(window=3), Ids(range(10))
    lease = cache.open(HERE)
    cache.resume(lease, ids, 9)
    held = []
    for length in range(1, 11):
        cache.grow(lease, length)
        cache.advance(lease, ids, 1)
        cache.check()
        held.append([place for place, page in enumerate(lease.table[LOCAL]) if page != NONE])
    assert held == [[0], [0], [0, 1], [0, 1], [0, 1, 2], [1, 2], [1, 2, 3], [2, 3], [2, 3, 4], [3, 4]]
    assert cache.pools[LOCAL].num_evictable == 3, "what fell out of the window is in the prefix cache"


def test_a_long_conversation_runs_in_a_small_window() -> None:
    """200 ids in 100 pages of the global group, and never more than 4 of the local one."""
    cache, ids = KVCache([Group(100), Group(4, 4)], 2), Ids(range(200))
    lease = cache.open(HERE)
    cache.resume(lease, ids, 199)
    for length in range(2, 201, 2):
        cache.grow(lease, length)
        cache.advance(lease, ids, 2)
    cache.check()
    assert [pool.num_free for pool in cache.pools] == [0, 0]
    assert len([page for page in lease.table[LOCAL] if page != NONE]) == 2


def test_what_a_window_lacks_idle_leases_give() -> None:
    cache = KVCache([Group(100), Group(4, 4)], 2)
    idle, _ = compute(cache, Ids(range(6)))
    lease, _ = compute(cache, Ids(range(50, 58)))
    assert idle.computed == 0
    assert lease.computed == 8


def test_ends_of_sequences_keep_their_windows_longest() -> None:
    """Two conversations; six of the local pages make way: first those that no window at an end needs, the oldest first."""
    cache = make_cache(window=4)
    for first in (0, 100):
        lease, _ = compute(cache, Ids(range(first, first + 12)))
        cache.close(lease)
    old, new = sorted(cache.tree.nodes(), key=lambda node: node.used)
    assert evict_window(cache.tree, LOCAL, 5) == 5
    kept = [[page != NONE for page in node.table[LOCAL]] for node in (old, new)]
    assert kept == [[False] * 3 + [True] * 3, [False] * 2 + [True] * 4]
    assert hit(cache, 12) == 12
    cache.check()


def test_a_prompt_is_found_again_without_its_last_page() -> None:
    """Group siblings: the prompt is whole pages, and its last id is always computed."""
    cache, ids = make_cache(), Ids(range(12))
    compute(cache, ids)
    evict_window(cache.tree, LOCAL, 3)
    _, cached = compute(cache, ids)
    assert cached == 10


def test_a_fork_shares_windows_and_copies_partial_pages_of_each_group() -> None:
    cache = make_cache()
    parent, _ = compute(cache, Ids(range(9)))
    child, copies = cache.fork(parent, 9)
    assert copies == [PageCopy(group, parent.table[group][4], child.table[group][4]) for group in (GLOBAL, LOCAL)]
    assert [row[:4] for row in child.table] == [row[:4] for row in parent.table]
    assert child.computed == 9
    cache.check()


def test_a_fork_into_a_page_that_left_the_window() -> None:
    """Of a parent at id 7, at id 1: the partial page of ids 0 and 1 is gone from the window of 3."""
    cache = make_cache(window=3)
    parent, ids = cache.open(HERE), Ids(range(7))
    cache.resume(parent, ids, 6)
    cache.grow(parent, 7)
    cache.advance(parent, ids, 7)
    assert cache.fork(parent, 1)[0].computed == 0
    assert cache.fork(parent, 4)[0].computed == 0
    assert cache.fork(parent, 7)[0].computed == 7
    cache.check()


def test_a_fork_further_back_than_the_window_starts_from_the_prefix_cache() -> None:
    cache = make_cache()
    parent, _ = compute(cache, Ids(range(20)))
    child, copies = cache.fork(parent, 7)
    assert (child.computed, copies) == (0, [])
    assert cache.resume(child, Ids(range(8)), 7) == 6
    cache.check()


def test_where_the_tree_has_no_page_of_a_window_it_takes_a_leases() -> None:
    cache, ids = make_cache(), Ids(range(6))
    first, _ = compute(cache, ids)
    cache.close(first)
    for place in (0, 1, 2):
        forget(cache, place)
    lease, cached = compute(cache, ids)
    assert cached == 0
    assert cache.pools[LOCAL].num_evictable == 1, "of ids 0 and 1"
    cache.close(lease)
    assert hit(cache, 6) == 6
