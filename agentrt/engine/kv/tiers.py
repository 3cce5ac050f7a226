"""The host tier: copies of pages in host memory, and the copies that are under way in either direction.

A state machine over pages; whoever moves the bytes is a `Copier`. Four fences keep both ends of a copy whole:

(a) a save starts after the computation that wrote its source, (b) a load after the one that last read or wrote its target:
    `Copier.start` promises both; (c) a page of the device is free only after the copies from and to it have ended, and
    (d) so is a page of the host: a job in flight holds a reference to both pages of each copy.

So an abort, a fork or an eviction in the middle of a copy needs no care: what is released meanwhile becomes free when the
job lets go of it. A page of the host is kept once, by the node of the prefix cache whose ids it belongs to.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple, Protocol, Self

from agentrt.engine.kv.evict import evict, evict_window
from agentrt.engine.kv.lease import Lease
from agentrt.engine.kv.pages import AWAY, NONE, PageCopies, PageCopy, singly
from agentrt.engine.kv.radix import DEVICE, HOST, Node, RadixTree

Direction = Literal["save", "load"]
JOBS_IN_FLIGHT = 2
"""Saves that are under way at one time: one that runs and one behind it."""


MOST_PAGES = 1 << 30
"""Saved at one time, where the budget is endless."""


class Event(Protocol):
    """The end of a job's copies."""

    @property
    def is_done(self) -> bool: ...

    @property
    def failed(self) -> Collection[int]:
        """Which copies came to nothing, by index into all; their targets hold anything. Known once it is done."""

    @property
    def checksums(self) -> Sequence[int]:
        """Of the targets, once it is done; empty where nobody asked for them."""

    def wait(self, seconds: float) -> bool:
        """Wait for the end, at most this long; whether it came."""


class Copier(Protocol):
    """Moves the bytes of pages between the device and the host."""

    bytes_per_second: float
    """One way. What is spent on a direction in one step follows from it."""

    def start(self, direction: Direction, copies: Sequence[PageCopies]) -> Event:
        """Copy pages of the device to pages of the host (`save`) or back (`load`).

        The copies start after everything that was computed before this call, and jobs of one direction end in the order
        they were started. It does not wait.
        """

    def close(self) -> None:
        """Wait for what is under way, and give back what it needs for its work."""


class Host(NamedTuple):
    """The memory of a host, and who moves pages there."""

    pages: Sequence[int]
    """How many of each group."""
    page_bytes: Sequence[int]
    """What a page of each group takes."""
    copier: Copier


@dataclass(eq=False, slots=True)
class Job:
    """Copies under way, and where in the prefix cache each of their pages of the host belongs."""

    direction: Direction
    path: list[Node]
    """With all of the places, the lowest first; splits leave the others above these."""
    copies: list[PageCopies]
    """One for each group."""
    places: list[list[int]]
    """Of the copies, by group, counted from the root; in order."""
    leases: list[Lease] = field(default_factory=list)
    """Those that a load brings pages to; those whose last pages a save copies."""
    event: Event = field(init=False)
    generation: int = 0
    failed: bool = False
    """Some of its copies came to nothing."""

    @classmethod
    def empty(cls, direction: Direction, path: list[Node], groups: int) -> Self:
        """A job to which copies are added."""
        return cls(direction, path, [PageCopies(group, [], []) for group in range(groups)], [[] for _ in range(groups)])

    def __len__(self) -> int:
        return sum(map(len, self.places))

    def pages(self, tier: int, group: int) -> list[int]:
        """Its pages of one group on a tier."""
        copies, is_source = self.copies[group], (self.direction == "save") == (tier == DEVICE)
        return copies.sources if is_source else copies.targets


class HostTier:
    """Saves and loads over the prefix cache's pages."""

    def __init__(self, tree: RadixTree, host: Host) -> None:
        self.tree, self.copier, self.page_bytes = tree, host.copier, host.page_bytes
        self.pools = tree.pools[HOST]
        """The pages of the host, by group."""
        self._queue: deque[Lease] = deque()
        self._saving: list[set[int]] = [set() for _ in tree.groups]
        """Pages of the device that are being copied, by group."""
        self._jobs: dict[Direction, deque[Job]] = {"save": deque(), "load": deque()}
        self._checksums: dict[tuple[int, int], int] = {}
        self.failed = 0
        """Copies that came to nothing."""

    @property
    def is_copying(self) -> bool:
        return any(self._jobs.values())

    @property
    def is_loading(self) -> bool:
        return bool(self._jobs["load"])

    @property
    def loading(self) -> list[Lease]:
        """Those to whose pages copies from the host are under way."""
        return [lease for job in self._jobs["load"] for lease in job.leases]

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and nothing waits to be saved."""
        return not self._queue and not self.is_copying

    def save(self, lease: Lease, *, at_once: bool = False) -> None:
        """Have the pages that an idle lease needs copied to the host: behind what waits already, or before it."""
        if not self.pools[0].num_pages or (lease.is_queued and not at_once):
            return
        if lease.is_queued:
            self._queue.remove(lease)
        lease.is_queued = True
        (self._queue.appendleft if at_once else self._queue.append)(lease)

    def make_room(self, leases: Sequence[Lease]) -> bool:
        """Room on the host for what is not there of leases that are to be parked. False if it is full.

        What no open lease needs makes way, and what one has on the device as well; but not what these have there already.
        """
        needed = [0] * len(self.pools)
        for _, _, group in {place for lease in leases for place in self._unsaved(lease)}:
            needed[group] += 1
        if self.pools[0].num_free < needed[0] and not self._has(0, needed[0]):
            spared = {node for lease in leases if lease.anchor for node in lease.anchor.path()}
            evict(self.tree, needed[0] - self.pools[0].num_free, HOST, doubles=True, spared=spared)
        return all(self._has(group, count) for group, count in enumerate(needed))

    def is_saved(self, lease: Lease) -> bool:
        """Whether all that a lease would be restored from is on the host, and there is something."""
        if lease.anchor is None:
            return False
        firsts = self._firsts(lease.anchor)
        return not any(
            NONE in row[max(first - node.start, 0) :]
            for node in lease.anchor.path()
            for row, first in zip(node.tables[HOST], firsts, strict=True)
        )

    def load(self, lease: Lease, take: Callable[[int, int], list[int]]) -> None:
        """Bring back the pages of the host that stand in the table of a lease. What is computed waits for `lease.job`.

        `take(group, count)` gives pages of the device. They take their place in the table at once.
        """
        assert lease.anchor is not None
        places = [[place for place, page in enumerate(row) if page < NONE] for row in lease.table]
        sources = [[AWAY - page for page in row if page < NONE] for row in lease.table]
        for pool, pages in zip(self.pools, sources, strict=True):
            pool.retain(pages)
        targets = [take(group, len(pages)) if pages else [] for group, pages in enumerate(sources)]
        for pool, row, pages, at in zip(self.tree.pools[DEVICE], lease.table, targets, places, strict=True):
            pool.retain(pages)
            for place, page in zip(at, pages, strict=True):
                row[place] = page
        copies = [PageCopies(group, *ends) for group, ends in enumerate(zip(sources, targets, strict=True))]
        lease.job = job = Job("load", _upwards(lease), copies, places, [lease])
        self._start(job)

    def pump(self, budget_bytes: float) -> None:
        """Start saves for what waits, up to this many bytes, unless enough are under way."""
        if not self._queue:
            return
        pages = int(min(max(budget_bytes / max(self.page_bytes), 1), MOST_PAGES))
        while pages > 0 and self._queue and len(self._jobs["save"]) < JOBS_IN_FLIGHT:
            lease = self._queue[0]
            job = Job.empty("save", _upwards(lease), len(self.pools))
            for node, place, group in islice(self._unsaved(lease), pages):
                if not self._has(group, 1):
                    break
                page = node.tables[DEVICE][group][place - node.start]
                job.copies[group].sources.append(page)
                job.copies[group].targets.extend(self.pools[group].take(1))
                job.places[group].append(place)
                self.tree.pools[DEVICE][group].retain((page,))
                self._saving[group].add(page)
            if len(job) < pages:  # all there is of it, or all there is room for
                self._queue.popleft()
                lease.is_queued = False
                job.leases.append(lease)
            pages -= max(len(job), 1)
            self._start(job)

    def poll(self) -> list[Job]:
        """End the jobs whose copies have ended, and return them; `leases` are those that their ending concerns."""
        ended = []
        for jobs in self._jobs.values():
            while jobs and jobs[0].event.is_done:
                ended.append(jobs.popleft())
                self._end(ended[-1])
        return ended

    def wait(self, seconds: float, first: Direction = "load") -> bool:
        """Wait until a job has ended, one of the direction `first` if there is any; False if none has within this time."""
        job = next((jobs[0] for jobs in (self._jobs[first], *self._jobs.values()) if jobs), None)
        return job is not None and job.event.wait(seconds)

    def forget(self, lease: Lease) -> None:
        """A lease needs nothing saved any more. Copies that are under way go on."""
        if lease.is_queued:
            self._queue.remove(lease)
            lease.is_queued = False

    def is_saving(self, lease: Lease) -> bool:
        """Its pages wait to be saved, or the last of them are being copied."""
        return lease.is_queued or any(lease in job.leases for job in self._jobs["save"])

    def in_copies(self, tier: int, group: int) -> list[int]:
        """Pages that jobs hold, one entry for each reference."""
        return [page for jobs in self._jobs.values() for job in jobs for page in job.pages(tier, group)]

    def _firsts(self, anchor: Node) -> list[int]:
        """The first place of each group that a lease with this anchor needs."""
        return [self.tree.first_kept(group, anchor.end) for group in self.tree.groups]

    def _unsaved(self, lease: Lease) -> Iterator[tuple[Node, int, int]]:
        """The places of a lease, with their group, whose page is on the device only and not being copied; head first."""
        if lease.anchor is None:
            return
        firsts = self._firsts(lease.anchor)
        for node in lease.anchor.path():
            if missing := [row.index(NONE) for row in node.tables[HOST] if NONE in row]:
                for place in range(node.start + min(missing), node.end):
                    for group, first in enumerate(firsts):
                        index, page = place - node.start, node.tables[DEVICE][group][place - node.start]
                        if place < first or page == NONE or node.tables[HOST][group][index] != NONE:
                            continue
                        if page not in self._saving[group]:
                            yield node, place, group

    def _has(self, group: int, count: int) -> bool:
        """Whether the host has this many free pages of a group, after giving up what no open lease needs."""
        pool = self.pools[group]
        if count > pool.num_free and pool.num_evictable:
            lacking = max(count - pool.num_free, pool.num_pages // 64)
            (evict(self.tree, lacking, HOST) if group == 0 else evict_window(self.tree, group, lacking, HOST))
        return count <= pool.num_free

    def _start(self, job: Job) -> None:
        job.generation = self._generation(job)
        job.event = self.copier.start(job.direction, job.copies) if len(job) else _Ended()
        self._jobs[job.direction].append(job)

    def _end(self, job: Job) -> None:
        """Let go of a job's pages. What was saved has its place on the host; what could not be loaded loses it."""
        failed = self._failed(job)
        assert self._generation(job) == job.generation, "a page was given away in the middle of a copy"
        for copies, places in zip(job.copies, job.places, strict=True):
            if job.direction == "save":
                self._saving[copies.group].difference_update(copies.sources)
                self._file(job.path, copies, places, failed)
        for tier, pools in enumerate(self.tree.pools):
            for group, pool in enumerate(pools):
                pool.release(job.pages(tier, group))
        if job.direction == "load":
            self._lose(job, failed)
        for node in job.path:
            self.tree.trim(node)
        job.failed = bool(failed)
        self.failed += len(failed)

    def _file(self, path: list[Node], copies: PageCopies, places: list[int], failed: Collection[PageCopy]) -> None:
        """Put what was saved in its place on the host."""
        group, saved = copies.group, list[int]()
        for place, page, other in zip(places, copies.sources, copies.targets, strict=True):
            if failed and (group, page, other) in failed:
                continue
            node, at = self.tree.locate(path[0], place)
            node.tables[HOST][group][at] = other
            saved.append(other)
        self.pools[group].cache(saved)

    def _generation(self, job: Job) -> int:
        """How often all of a job's pages were taken by now: another number once one of them is somebody else's."""
        return sum(
            sum(map(pool.generations.__getitem__, job.pages(tier, group)))
            for tier, pools in enumerate(self.tree.pools)
            for group, pool in enumerate(pools)
        )

    def _failed(self, job: Job) -> set[PageCopy]:
        """The copies of a job that came to nothing, those among them whose checksum is another than when it was saved."""
        indices, checksums = job.event.failed, job.event.checksums
        if not (indices or checksums):
            return set()
        copies = singly(job.copies)
        failed = {copies[index] for index in indices}
        for copy, checksum in zip(copies, checksums, strict=False):
            if job.direction == "save":
                self._checksums[copy.group, copy.target] = checksum
            elif self._checksums.get((copy.group, copy.source), checksum) != checksum:
                failed.add(copy)
        return failed

    def _lose(self, job: Job, failed: Collection[PageCopy]) -> None:
        """What failed to be loaded is no good on the host either, and nobody finds it there any more."""
        for copy in failed:
            group, page, _ = copy
            place = job.places[group][job.copies[group].sources.index(page)]
            node, at = self.tree.locate(job.path[0], place)
            pool, row = self.pools[group], node.tables[HOST][group]
            # Another load from it, if there is one, will fail as well, and come here when it ends.
            if row[at] == page and pool.is_evictable(page):
                pool.uncache((page,))
                row[at] = NONE


def _upwards(lease: Lease) -> list[Node]:
    return lease.anchor.path()[::-1] if lease.anchor else []


class NoCopier:
    """The copier of a host without pages."""

    bytes_per_second = 0.0

    def start(self, direction: Direction, copies: Sequence[PageCopies]) -> Event:
        raise AssertionError("there is no host tier to copy to")

    def close(self) -> None:
        """It holds nothing."""


def no_host(groups: int) -> Host:
    """For an engine without a host tier."""
    return Host([0] * groups, [1] * groups, NoCopier())


class _Ended:
    """The event of a job without copies: it ends when those before it have ended."""

    is_done = True
    failed: Collection[int] = ()
    checksums: Sequence[int] = ()

    def wait(self, seconds: float) -> bool:
        return True
