"""Which pages the prefix cache gives up: least recently used first, a tail before its head, those that no lease needs first.

Only pages that nobody but the tree holds. A page of the device that has a copy on the host leaves a place that can be
restored; one without leaves nothing.
"""

from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush
from itertools import count as count_from_0

from agentrt.engine.kv.pages import NONE
from agentrt.engine.kv.radix import DEVICE, HOST, Node, RadixTree


def evict(
    tree: RadixTree, count: int, tier: int = DEVICE, *, doubles: bool = False, spared: Collection[Node] = ()
) -> int:
    """Free up to `count` pages of group 0 on a tier; what other groups have at the same places goes with them.

    On the host the places of open leases stay, for that copy may be all they have; but for `doubles`, whose place somebody
    holds on the device. Nodes that are `spared` keep what they have. Returns how many pages it freed.
    """
    order, refs = count_from_0(), tree.pools[tier][0].refs
    nodes = tree.resident if tier == DEVICE else tree.nodes()
    ends = [(node, node.tables[tier][0][-1]) for node in nodes]
    heap = [
        (*_rank(node), next(order), node)
        for node, last in ends
        if (last == NONE or refs[last] == 1)  # nobody but the tree holds it: not so for most
        and node not in spared
        and _is_candidate(tree, node, tier, doubles)
    ]
    heapify(heap)
    freed = 0
    while heap and freed < count:
        node = heappop(heap)[-1]
        parent = node.parent
        freed += _evict_tail(tree, node, tier, count - freed)
        tree.trim(node)
        if parent is not None and parent not in spared and _is_candidate(tree, parent, tier, doubles):
            heappush(heap, (*_rank(parent), next(order), parent))
    return freed


def evict_window(tree: RadixTree, group: int, count: int, tier: int = DEVICE) -> int:
    """Free up to `count` pages of a group with a window that nobody else holds, least recently used first.

    The windows before the ends of nodes go last: there, sequences parted or ended, and most likely go on.
    """
    pool, freed = tree.pools[tier][group], 0
    for node, place in list(_in_order_of_worth(tree, group)):
        row = node.tables[tier][group]
        if freed == count:
            break
        if row[place] != NONE and pool.is_evictable(row[place]) and not (tier == HOST and node.users):
            pool.uncache((row[place],))
            row[place] = NONE
            freed += 1
    return freed


def _rank(node: Node) -> tuple[bool, int]:
    return node.users > 0, node.used


def _is_candidate(tree: RadixTree, node: Node, tier: int, doubles: bool) -> bool:
    """Its last page on the tier may go: nobody holds it, and no page of the tier lies below it.

    One without places went with the last below it.
    """
    if node.parent is None or not node.length or (tier == HOST and node.users and not doubles):
        return False
    last = _last(node, tier)
    if last < 0 or not _may_go(tree, node, tier, last):
        return False
    return all(child.tables[tier][0][0] == NONE for child in node.children.values())


def _may_go(tree: RadixTree, node: Node, tier: int, index: int) -> bool:
    """Nobody needs the page at this index of a node on this tier."""
    if not tree.pools[tier][0].is_evictable(node.tables[tier][0][index]):
        return False
    page = node.tables[DEVICE][0][index]
    return tier == DEVICE or not node.users or (page != NONE and not tree.pools[DEVICE][0].is_evictable(page))


def _last(node: Node, tier: int) -> int:
    row = node.tables[tier][0]
    if row and row[-1] != NONE:
        return len(row) - 1
    if row.count(NONE) == len(row):
        return -1
    return next((index for index in range(len(row) - 1, -1, -1) if row[index] != NONE), -1)


def _evict_tail(tree: RadixTree, node: Node, tier: int, count: int) -> int:
    row, freed = node.tables[tier][0], 0
    end = first = _last(node, tier) + 1
    while first and freed < count and (row[first - 1] == NONE or _may_go(tree, node, tier, first - 1)):
        first -= 1
        freed += row[first] != NONE  # a copy that failed has none
    for pool, row in zip(tree.pools[tier], node.tables[tier], strict=True):
        gone = [index for index in range(first, end) if row[index] != NONE and pool.is_evictable(row[index])]
        pool.uncache(row[index] for index in gone)
        for index in gone:
            row[index] = NONE
    return freed


def _in_order_of_worth(tree: RadixTree, group: int) -> Iterator[tuple[Node, int]]:
    """Every place of a group, as a node and an index into its rows; the least worth first."""
    nodes = sorted(tree.nodes(), key=lambda node: node.used)
    # From one place before the end: a prompt's last id is always computed, so it is matched without its last page.
    ends = [max(0, tree.first_kept(tree.groups[group], node.end - 1) - node.start) for node in nodes]
    for node, end in zip(nodes, ends, strict=True):
        yield from ((node, place) for place in range(min(end, node.length)))
    for node, end in zip(nodes, ends, strict=True):
        yield from ((node, place) for place in range(end, node.length))
