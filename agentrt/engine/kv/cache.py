"""All that decides which page holds what: the page pools, the prefix cache over them, the host tier and every lease.

What is to become of idle leases is a policy's word (`kv.policy`); that it is carried out, and that somebody can always go
on, is this file's. Sequences, steps and the model are none of its business.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter

from agentrt.core.tokens import IntArray
from agentrt.engine.kv.account import count_held
from agentrt.engine.kv.evict import evict, evict_window
from agentrt.engine.kv.group import Group
from agentrt.engine.kv.lease import REVOCABLE, IllegalMoveError, Lease, Pause, State
from agentrt.engine.kv.pages import NONE, PageCopy, PagePool, pages_of
from agentrt.engine.kv.policy import EVERYBODY, Kind, LeaseView, Lru, Policy, PoolView
from agentrt.engine.kv.radix import DEVICE, HOST, Namespace, Node, RadixTree, Rows
from agentrt.engine.kv.rates import Rates, StepCosts
from agentrt.engine.kv.tiers import Host, HostTier, Job, no_host

PINNED_SHARE = 0.6
"""Of the device's pages, at most, in pinned leases."""
SAVE_ABOVE = 0.5
"""Of the device's pages in use: from there on, the pages of a turn that ended are saved while the link is idle."""
COPY_SECONDS = 10.0
"""How long it waits for copies that hold the last pages there are."""
CUT_SHARE = 0.01
"""Of its time limit: a tool that ends this near it was ended by it. What is told of tools comes up to a step late."""
INSIDE_SECONDS = 0.5
"""How long the policy's word on who is let in holds."""
HEADROOM = 0.125
"""Of the device's pages: prefetching leaves as many for those that run."""


class KVCache:
    """Pages of `page_size` ids on the device and, if there is one, on a host."""

    def __init__(
        self, groups: Sequence[Group], page_size: int, host: Host | None = None, policy: Policy | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        host = host or no_host(len(groups))
        self.groups, self.page_size, self.policy, self.clock = groups, page_size, policy or Lru(), clock
        self.pools = [PagePool(group.num_pages) for group in groups]
        self.pool = self.pools[0]
        """That of group 0. The scheduler counts its pages only: with those, the other groups have theirs."""
        self._spare = int(HEADROOM * self.pool.num_pages)
        self.tree = RadixTree(groups, (self.pools, [PagePool(count) for count in host.pages]), page_size)
        self.tier = HostTier(self.tree, host)
        self.costs = StepCosts()
        """Whoever runs steps notes here what they took."""
        self.num_pinned = 0
        """Pages of group 0 in pinned leases; one that several pinned leases share counts for each."""
        self._leases: dict[Lease, None] = {}  # in order of last use
        self._parked: dict[Lease, None] = {}  # in the order they were parked
        self._parking: dict[Lease, None] = {}
        """Those whose pages come free when their copies have been made."""
        self.num_reprefilled = 0
        """Ids computed again whose KV was there once."""
        self._numbered = 0
        self._lost: list[Lease] = []
        """Running leases whose pages could not be restored."""
        self._refused = 0
        """Pages that were too few to prefetch into: it is not tried again before there are more, or other leases."""
        self.on_review: Callable[[], None] = lambda: None
        """Called before all leases are looked at: whoever has not counted yet what was computed does so now."""
        self._inside, self._asked = EVERYBODY, -math.inf
        """Who is let in, and when the policy was asked for it."""

    @property
    def num_tokens(self) -> int:
        """Ids that fit."""
        return self.pool.num_pages * self.page_size

    @property
    def num_parked(self) -> int:
        """Leases whose KV is on the host only."""
        return len(self._parked)

    def open(self, namespace: Namespace) -> Lease:
        """A new, empty lease; its owner closes it."""
        self._numbered += 1
        lease = Lease(namespace, len(self.groups), self._numbered, self.clock())
        self._leases[lease] = None
        return lease

    def enroll(self, lease: Lease) -> None:
        """The first request of a lease has come: it is numbered anew, in the order of these."""
        self._numbered += 1
        lease.number = self._numbered
        lease.take_place(lease.place[:-1])

    def close(self, lease: Lease) -> None:
        """Give everything back. Closing twice does nothing. Raises `IllegalMoveError` if it runs."""
        if lease in self._leases:
            self._end_pause(lease, is_cut=True)
            self.drop(lease, State.CLOSED)
            del self._leases[lease]

    def resume(self, lease: Lease, ids: IntArray, matchable: int) -> int:
        """Make a lease run; one without pages takes the longest cached prefix of the first `matchable` of `ids`.

        Returns how many ids have their KV, or will have it when the copies of `lease.job` have been made. Pages for
        these can be had: the caller has counted on all of them.
        """
        self._move(lease, State.RUNNING)
        lease.resumed = self.clock()
        self._leases[lease] = self._leases.pop(lease)
        if not lease.pages:
            node, table = self.tree.match(lease.namespace, ids, matchable // self.page_size)
            if _is_partly_away(table):
                node = self.tree.node_at(lease.namespace, node, ids, len(table[0]))
            self._take_over(lease, node, table)
        lease.is_wanted = False
        again = max(0, min(lease.high_water, len(ids)) - self.arriving(lease))
        lease.meter.reprefilled += again
        self.num_reprefilled += again
        self._count_held(lease)
        return self.arriving(lease)

    def finds(self, lease: Lease, ids: IntArray, matchable: int) -> bool:
        """Whether all whole pages of the first `matchable` of `ids` are cached for a lease: it has nothing to wait for."""
        whole = matchable // self.page_size
        return len(self.tree.match(lease.namespace, ids, whole)[1][0]) == whole

    def suspend(self, lease: Lease, ids: IntArray) -> None:
        """The sequence stopped running: its whole pages go to the prefix cache, and the lease may be revoked."""
        self.settle(lease, ids)
        self._move(lease, State.RESTORING if lease.job else State.CACHED)
        self._count_held(lease)
        in_use = self.pool.num_pages - self.pool.num_available
        if lease.state is State.CACHED and self.policy.uses_host and in_use > SAVE_ABOVE * self.pool.num_pages:
            self.tier.save(lease)

    def grow(self, lease: Lease, tokens: int) -> None:
        """Room for the KV of `tokens` ids in all; evicts what it must. The scheduler has made sure that it can."""
        missing = -(-tokens // self.page_size) - len(lease.table[0])
        if missing > 0:
            for group, row in enumerate(lease.table):
                row.extend(self._take(group, missing))
            lease.meter.charge(self.clock())
            lease.meter.device_bytes += missing * sum(self.tier.page_bytes)

    def advance(self, lease: Lease, ids: IntArray, count: int) -> None:
        """The KV of the next `count` of `ids` is in its pages. What fell out of a window goes to the prefix cache."""
        lease.computed += count
        lease.high_water = max(lease.high_water, lease.computed)
        if len(self.groups) > 1:
            self._leave_behind(lease, ids)

    def trim(self, lease: Lease) -> None:
        """Give back the pages beyond the computed ids: what a draft had that did not stand."""
        needed = self.pages_for(lease.computed)
        if len(lease.pages) > needed:
            lease.meter.charge(self.clock())
            lease.meter.device_bytes -= (len(lease.pages) - needed) * sum(self.tier.page_bytes)
            for pool, row in zip(self.pools, lease.table, strict=True):
                pool.release(pages_of(row[needed:]))
                del row[needed:]

    def branch(self, lease: Lease, branches: Sequence[tuple[int, int, int]]) -> list[PageCopy]:
        """Give a lease a table for each of these branches of what may follow its computed ids.

        A branch is the one that it leaves (0 for the lease's own table), the position where it does, and where it ends. Up
        to the page of that position it has the pages of the other, from there on its own; the scheduler has made sure that
        there are. What is computed of that page has to be copied at once.
        """
        copies = []
        for parent, start, stop in branches:
            tables, place = [lease.table, *lease.branches], start // self.page_size
            table = [row[:place] for row in tables[parent]]
            for group, row in enumerate(table):
                row.extend(self._take(group, self.pages_for(stop) - place))
                if lease.computed > place * self.page_size:
                    copies.append(PageCopy(group, lease.table[group][place], row[place]))
            lease.branches.append(table)
        return copies

    def join(self, lease: Lease, branch: int) -> None:
        """Go on with the pages of this branch (0: the lease's own), and give back what the others have beside them.

        They differ from the page of the last computed id on, which all branches follow.
        """
        tables, first = [lease.table, *lease.branches], (lease.computed - 1) // self.page_size
        lease.meter.charge(self.clock())
        lease.meter.device_bytes += (len(tables[branch][0]) - len(lease.pages)) * sum(self.tier.page_bytes)
        for group, pool in enumerate(self.pools):
            held, kept = {page for table in tables for page in table[group][first:]}, tables[branch][group][first:]
            pool.release(held.difference(kept))
            lease.table[group][first:] = kept
        lease.branches = []

    def settle(self, lease: Lease, ids: IntArray) -> None:
        """Put the lease's whole computed pages into the prefix cache. Costs what is new since the last time."""
        whole = lease.computed // self.page_size
        if whole > (lease.anchor.end if lease.anchor else 0):
            lease.is_saved = False
            self._anchor(lease, self.tree.insert(lease.namespace, lease.anchor, ids, lease.table, whole))

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
            first = self.tree.first_kept(group, whole)
            if NONE in row[first : self.pages_for(computed)]:
                return child, []
            table.append([NONE] * first + row[first:whole].tolist())
        if not computed:
            return child, []
        targets = [self._take(group, 1)[0] for group in range(len(self.groups))] if rest else []
        if parent.computed < computed:  # it was parked while pages were freed for the copy
            for pool, target in zip(self.pools, targets, strict=True):
                pool.release((target,))
            return child, []
        self._move(child, State.CACHED)
        is_above = parent.anchor is not None and parent.anchor.end <= whole
        self._take_over(child, parent.anchor if is_above else None, table)
        copies = [PageCopy(group, parent.table[group][whole], target) for group, target in enumerate(targets)]
        for copy in copies:
            child.table[copy.group].append(copy.target)
        child.computed = child.high_water = computed
        self._count_held(child)
        return child, copies

    def pause(self, lease: Lease, pause: Pause) -> None:
        """A tool starts, and the policy says what becomes of the lease meanwhile. Raises if it runs or is closed."""
        if lease.state in (State.RUNNING, State.CLOSED):
            raise IllegalMoveError(f"a lease that is {lease.state} cannot pause")
        lease.pause = pause
        lease.meter.pause(self.clock())
        if lease.state in (State.CACHED, State.PINNED):
            self._apply(lease, self.policy.on_pause(LeaseView.of(lease, self.page_size, self.clock()), self._rates()))

    def unpause(self, lease: Lease) -> None:
        """The tool has ended and a turn follows: what is parked comes back at once, if there is room."""
        if self._end_pause(lease) and lease.state is State.PARKED and self.is_inside(lease):
            self._restore(lease)

    def revoke(self, lease: Lease) -> None:
        """Take the pages from an idle lease. It is parked if all it needs is on the host, else dropped."""
        if not lease.pages:
            return
        is_saved = self.tier.is_saved(lease)
        self._move(lease, State.PARKED if is_saved else State.DROPPED)
        self._release(lease)
        if not is_saved:
            self._anchor(lease, None)
        self._count_held(lease)

    def drop(self, lease: Lease, state: State = State.DROPPED) -> None:
        """Have an idle lease give up its KV, on the host too. It finds what is in the prefix cache when it next runs."""
        self._move(lease, state)
        self.tier.forget(lease)
        self._release(lease)
        self._anchor(lease, None)
        self._count_held(lease)

    def renew(self, version: int, *, keep: bool = False) -> None:
        """There is a new policy: every lease moves to its namespace and gives up the KV of the old one, on the host too.

        None of them runs. With `keep` only those move that have no KV, and others may run.
        """
        for lease in self._leases:
            has_kv = lease.state not in (State.OPEN, State.DROPPED)
            if has_kv and not keep:
                self.drop(lease)
            if not (has_kv and keep):
                lease.namespace = lease.namespace._replace(version=version)

    def revoke_idle(self) -> bool:
        """Revoke the least recently used lease that may be revoked, a pinned one last; False if there is none."""
        idle = [lease for lease in self._leases if lease.state in REVOCABLE or lease.state is State.PARKING]
        victim = next((lease for lease in idle if lease.state is not State.PINNED), idle[-1] if idle else None)
        if victim is not None:
            self.revoke(victim)
        return victim is not None

    def make_room(
        self, lacking: int, *, waiting: int = 0, is_stuck: bool = False, spared: Collection[Lease] = ()
    ) -> bool:
        """Have idle leases give up pages, as the policy says, until `lacking` more can be had; `spared` keeps its own.

        False if no page came free. Some may come when copies have been made: see `wait_for_parking`. If nobody can go on
        (`is_stuck`) and the policy gives up nothing, its pins are revoked.
        """
        goal = self.pool.num_available + lacking
        coming = sum(self.pages_for(lease.unshared) for lease in self._parking)
        if coming >= lacking:
            return False
        leases = [lease for lease in self._leases if lease.state in REVOCABLE and lease not in spared]
        if not leases:
            return False
        now, before = self.clock(), self.pool.num_available
        pool = self._pool_view(waiting=waiting, lacking=lacking - coming, is_stuck=is_stuck)
        views = [LeaseView.of(lease, self.page_size, now, slot) for slot, lease in enumerate(leases)]
        for action in self.policy.make_room(views, pool):
            if self.pool.num_available >= goal:
                break
            self._apply(leases[action.slot], action.kind)
        if is_stuck:
            self.tier.pump(math.inf)
            while self.pool.num_available == before and not self.tier.is_copying and leases:
                self.revoke(leases.pop())
        return self.pool.num_available > before

    def is_inside(self, lease: Lease) -> bool:
        """Whether its turns are let in while others run."""
        return bool(self.inside([lease]))

    def inside(self, leases: Sequence[Lease]) -> Sequence[int]:
        """The places of those of `leases` whose turns are let in while others run."""
        now = self.clock()
        if now >= self._asked + INSIDE_SECONDS:
            self._asked = now
            self._inside = self.policy.inside(self._by_rank(now), self._pool_view())
        if self._inside == EVERYBODY:
            return range(len(leases))
        with_kv, without = self._inside
        return [
            at for at, one in enumerate(leases)
            if one.place <= (with_kv if one.anchor or one.computed else without)
        ]  # fmt: skip

    def prefetch(self, budget_bytes: float) -> None:
        """Bring parked leases back to pages that nobody needs: what fits the budget, but one at least."""
        if not self._parked or self.tier.is_loading:
            return
        slack = self.pool.num_available - self._spare
        if slack <= self._refused:
            return
        leases, now = list(self._parked), self.clock()
        views = [LeaseView.of(lease, self.page_size, now, slot) for slot, lease in enumerate(leases)]
        for slot in self.policy.prefetch(views, self._pool_view()):
            if budget_bytes <= 0:
                return
            if not self._restore(leases[slot], self._spare):
                self._refused = slack
                return
            budget_bytes -= leases[slot].meter.device_bytes

    def is_still(self, is_lacking: bool) -> bool:
        """No copy is under way, and none is to be started as long as nothing else happens; see `prefetch`."""
        is_full = is_lacking or not self._parked or self.pool.num_available - self._spare <= self._refused
        return is_full and self.tier.is_idle

    def poll(self) -> list[Lease]:
        """Take note of copies that have ended. Returns running leases whose pages could not be restored."""
        self._note(self.tier.poll())
        lost, self._lost = self._lost, []
        return lost

    def park(self, lease: Lease) -> None:
        """Have an idle lease give up its pages: once they are saved on the host, or at once if they cannot be."""
        self._apply(lease, "park" if self.policy.uses_host else "drop")

    def wait_for_parking(self) -> bool:
        """Wait until copies of leases that are being parked have ended; False if there are none, or they do not end."""
        self.tier.pump(math.inf)
        return bool(self._parking) and self.tier.wait(COPY_SECONDS, "save")

    def arriving(self, lease: Lease) -> int:
        """Ids whose KV is in its pages, or is being copied to them."""
        return len(lease.pages) * self.page_size if lease.job else lease.computed

    def pages_for(self, tokens: int) -> int:
        """Pages of one group that the KV of `tokens` ids takes."""
        return -(-tokens // self.page_size)

    def describe(self) -> str:
        """Who holds what, for a message."""
        holders = [f"lease {lease.number} ({lease.state}) {len(lease.pages)}" for lease in self._leases if lease.pages]
        return f"{self.pool}; pages by lease: {', '.join(holders) or 'none'}"

    def check(self) -> None:
        """Raise `AssertionError` if a page is lost, held twice, or free and held. The end of every engine test."""
        self.tree.check()
        for group, (device, host) in enumerate(zip(*self.tree.pools, strict=True)):
            tables = [pages_of(lease.table[group]) for lease in self._leases]
            device.check(tables, self.tree.pages(group), self.tier.in_copies(DEVICE, group))
            host.check([], self.tree.pages(group, HOST), self.tier.in_copies(HOST, group))
        for lease in self._leases:
            lease.check(self.tree, self.page_size)
        assert set(self._parked) == {lease for lease in self._leases if lease.state is State.PARKED}
        assert set(self._parking) == {lease for lease in self._leases if lease.state is State.PARKING}
        pinned = [len(lease.pages) for lease in self._leases if lease.state is State.PINNED]
        assert self.num_pinned == sum(pinned) <= PINNED_SHARE * self.pool.num_pages, "too much is pinned"

    def _end_pause(self, lease: Lease, *, is_cut: bool = False) -> bool:
        """Tell the policy that the tool has ended; False if none ran. One that was ended at its deadline was cut too."""
        if lease.pause is None:
            return False
        view = LeaseView.of(lease, self.page_size, self.clock())
        left = math.inf if view.deadline is None else view.deadline
        self.policy.on_resume(view, is_cut=is_cut or (1 - CUT_SHARE) * left <= CUT_SHARE * view.elapsed)
        lease.meter.resume(self.clock())
        lease.pause = None
        return True

    def _move(self, lease: Lease, state: State) -> None:
        before = lease.state
        lease.move(state)
        pages = len(lease.pages)
        self.num_pinned += pages * ((state is State.PINNED) - (before is State.PINNED))
        self._parking.pop(lease, None)
        self._parked.pop(lease, None)
        if state is State.PARKING:
            self._parking[lease] = None
        elif state is State.PARKED:
            self._parked[lease] = None
            self._refused = 0

    def _anchor(self, lease: Lease, node: Node | None) -> None:
        old, lease.anchor = lease.anchor, node
        lease.is_saved = lease.is_saved and node is old
        self.tree.hold(old, node)

    def _release(self, lease: Lease) -> None:
        for pool, row in zip(self.pools, lease.table, strict=True):
            pool.release(pages_of(row))
            del row[:]
        lease.computed, lease.job = 0, None

    def _apply(self, lease: Lease, kind: Kind) -> None:
        """Do to an idle lease what the policy says; what cannot be done becomes the next best."""
        match kind:
            case "keep" if self.num_pinned + len(lease.pages) <= PINNED_SHARE * self.pool.num_pages:
                if lease.state is State.CACHED:
                    self._move(lease, State.PINNED)
            case "park" if not self.tier.is_saved(lease) and lease.state is not State.RESTORING:
                if lease.anchor is not None and self._make_host_room(lease):
                    self._move(lease, State.PARKING)
                    self.tier.save(lease, at_once=True)
                else:
                    self.revoke(lease)
            case "park" | "drop":
                self.revoke(lease)

    def _make_host_room(self, lease: Lease) -> bool:
        """Room on the host for a lease, if need be in the place of those that wait outside, the latest opened first."""
        leases, free = [lease, *self._parking], self.tier.pools[0].num_free
        while not (has_room := self.tier.make_room(leases)):
            outside = [parked for parked in self._parked if parked.place > max(self._inside.with_kv, lease.place)]
            if not outside:
                break
            last = max(outside, key=attrgetter("place"))
            self._move(last, State.DROPPED)
            self._anchor(last, None)
            self._count_held(last)
        if self.tier.pools[0].num_free > free:  # copies of what leases have on the device may have made way
            for one in self._leases:
                one.is_saved = one.is_saved and self.tier.is_saved(one)
        return has_room

    def _take_over(self, lease: Lease, node: Node | None, table: Rows) -> None:
        """Give an empty lease these whole pages, which are in the prefix cache; those of the host are copied back."""
        for pool, row in zip(self.pools, table, strict=True):
            pool.retain(pages_of(row))
        for own, row in zip(lease.table, table, strict=True):
            own.fromlist(row)
        self._anchor(lease, node)
        if _is_partly_away(table):
            self.tier.load(lease, self._take)
        else:
            lease.computed = len(lease.pages) * self.page_size
            lease.high_water = max(lease.high_water, lease.computed)

    def _restore(self, lease: Lease, spare: int = 0) -> bool:
        """Bring back a parked lease, leaving `spare` pages of group 0; False if there is no room."""
        assert lease.anchor is not None
        _, table = self.tree.table_of(lease.anchor)
        if len(table[0]) < lease.anchor.end:  # a copy from the host has failed for somebody else
            self._move(lease, State.DROPPED)
            self._anchor(lease, None)
            return True
        for group, (pool, row) in enumerate(zip(self.pools, table, strict=True)):
            there = pages_of(row)
            coming = len(row) - row.count(NONE) - len(there)
            if coming + pool.count_evictable(there) + (0 if group else spare) > pool.num_available:
                return False
        self._take_over(lease, lease.anchor, table)
        self._move(lease, State.RESTORING if lease.job else State.CACHED)
        self._count_held(lease)
        return True

    def _note(self, ended: Sequence[Job]) -> None:
        for job in ended:
            for lease in job.leases:
                if job.direction == "save":
                    self._saved(lease)
                elif lease.job is job and not self._arrived(lease, job):
                    self._lost.append(lease)

    def _arrived(self, lease: Lease, job: Job) -> bool:
        """The copies back to the pages of a lease have ended. False if it runs and some came to nothing."""
        lease.job = None
        if job.failed:
            if not lease.is_running:
                self.revoke(lease)
            return not lease.is_running
        lease.computed = len(lease.pages) * self.page_size
        assert lease.anchor is not None
        self.tree.adopt(lease.anchor, lease.table)
        lease.meter.restored += len(job.pages(DEVICE, 0)) * self.page_size
        if lease.is_running:
            lease.meter.wait += self.clock() - lease.resumed
        else:
            self._move(lease, State.CACHED)
        self._count_held(lease)
        return True

    def _saved(self, lease: Lease) -> None:
        """The last copies of a lease to the host have ended. One that is being parked goes, also if some came to nothing."""
        lease.is_saved = self.tier.is_saved(lease)
        if lease.state is State.PARKING and (lease.is_saved or not self.tier.is_saving(lease)):
            self.revoke(lease)
        elif lease.state is not State.CLOSED:
            self._count_held(lease)

    def _count_held(self, lease: Lease) -> None:
        count_held(lease, self.tier, self.page_size, self.clock())

    def _by_rank(self, now: float) -> Iterator[LeaseView]:
        """All leases, who comes first first; made when somebody looks at them."""
        self.on_review()
        for slot, lease in enumerate(sorted(self._leases, key=attrgetter("place"))):
            yield LeaseView.of(lease, self.page_size, now, slot)

    def _pool_view(self, *, waiting: int = 0, lacking: int = 0, is_stuck: bool = False) -> PoolView:
        host = self.tier.pools[0]
        return PoolView(
            self.page_size, self.pool.num_pages, self.pool.num_available, host.num_pages, self._host_room(), waiting, lacking,
            is_stuck, self._rates(), self._inside,
        )  # fmt: skip

    def _rates(self) -> Rates:
        return self.costs.rates(sum(self.tier.page_bytes) / self.page_size, self.tier.copier.bytes_per_second)

    def _host_room(self) -> int:
        """Pages of the host that a lease can have: all but those that others are parked with, will be, or come back from.

        Those that wait outside make way. What lies above the pages of a parked lease stays, whoever else has it.
        """
        staying, pages, with_kv = set[Node](), 0, self._inside.with_kv
        parked = [lease for lease in self._parked if lease.place <= with_kv]
        for lease in (*parked, *self._parking, *self.tier.loading):
            node = lease.anchor
            while node is not None and node.parent is not None and node not in staying:
                staying.add(node)
                pages += node.end - node.start
                node = node.parent
        return self.tier.pools[0].num_pages - pages

    def _leave_behind(self, lease: Lease, ids: IntArray) -> None:
        """Let go of what no window needs any more, were it to go on from its last whole page."""
        whole = lease.computed // self.page_size
        for group, pool, row in zip(self.groups[1:], self.pools[1:], lease.table[1:], strict=True):
            place = self.tree.first_kept(group, whole) - 1
            if place >= 0 and row[place] != NONE:
                self.settle(lease, ids)
            while place >= 0 and row[place] != NONE:
                pool.release((row[place],))
                row[place] = NONE
                place -= 1

    def _take(self, group: int, count: int) -> list[int]:
        """Free pages of a group; evicts what it must. For a window, which no plan counts, it revokes idle leases too."""
        pool = self.pools[group]
        self._evict(group, count)
        while pool.num_free < count and self.tier.wait(COPY_SECONDS):  # copies hold what could make way
            self._note(self.tier.poll())
            self._evict(group, count)
        return pool.take(count)

    def _evict(self, group: int, count: int) -> None:
        pool = self.pools[group]
        lacking = count - pool.num_free
        if lacking > 0 and group == 0:
            evict(self.tree, max(lacking, pool.num_pages // 64))
        elif lacking > 0:
            while pool.num_available < count and self.revoke_idle():
                pass
            # A sixteenth of the pool at once, for the search goes through the whole tree.
            evict_window(self.tree, group, max(count - pool.num_free, pool.num_pages // 16))


def _is_partly_away(table: Rows) -> bool:
    """Some of its pages are on the host only."""
    return any(min(row, default=NONE) < NONE for row in table)
