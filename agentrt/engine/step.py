"""The engine's core: one step after another, in whatever thread calls it.

    copies that ended ─► plan ─► make room ─► copies to start ─► batch ─► run ─► sample ─► commit

Nothing here reads a clock of the event loop or knows of sessions; the service does. It waits for nothing but copies that
somebody needs to go on. Policy version, pages and the sequences in flight are owned by this object alone.
"""

import math
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as List
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

from agentrt.core.errors import EngineFailure
from agentrt.core.protocol import EngineStatistics, WeightSource
from agentrt.core.spec import EngineSpec
from agentrt.engine.batch import Batch, build_batch
from agentrt.engine.conversations import Conversations
from agentrt.engine.forecast import Growth, Lengths, growths_of
from agentrt.engine.kv.cache import KVCache
from agentrt.engine.kv.choose import make_policy
from agentrt.engine.kv.group import Group
from agentrt.engine.kv.lease import Lease, Pause, State
from agentrt.engine.kv.pages import PageCopy
from agentrt.engine.kv.radix import Namespace
from agentrt.engine.kv.tiers import Host
from agentrt.engine.readiness import Readiness
from agentrt.engine.sampler import Drawn, Logits, laws_of, sample, score
from agentrt.engine.scheduler import NOBODY, Capacity, Crew, Demand, Line, Plan, plan_step
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.accept import committed
from agentrt.engine.speculate.draft import NO_DRAFT
from agentrt.engine.speculate.drafter import Drafter
from agentrt.engine.speculate.speculator import Speculator
from agentrt.engine.update import Update, stage_together
from agentrt.engine.waiting import WaitingQueue
from agentrt.engine.weights import Install
from agentrt_kernels.sample.rules import Rule

LINK_SHARE = 0.8
"""Of the time of a step, at most, that copies are started for in either direction."""
STANDBY_SECONDS = 0.01
"""How long a step without anything to compute waits for a copy, before it sees to what else was asked of the engine."""
RESERVE_AFTER = 3
"""Preemptions after which a sequence comes back only with room for all it may still sample."""
_rank = attrgetter("rank")


class StallError(EngineFailure):
    """Sequences wait, and nothing that the engine could do lets one of them go on. The message says who holds what."""


class Runner(Protocol):
    """The model on its device, and the buffers that the pages lie in."""

    groups: tuple[Group, ...]
    """Sized as `kv.group.size_groups` does."""
    page_size: int
    host: Host
    """The memory beside the device, and who copies pages there."""
    cost_per_key: float
    """What a row costs more for each key it attends, in rows that attend nothing."""

    def run(self, batch: Batch) -> Logits:
        """Write the KV of every row to its page and return `logits_MV` for `batch.out_rows_M`."""

    def copy_page(self, copy: PageCopy) -> None:
        """Copy one page's KV."""

    def stage(self, source: WeightSource) -> Install:
        """Read and check new weights, and make of them all that is needed, while `run` is called in another thread.

        Raises `WeightsError`. Nothing changes before the result is called, and then all at once.
        """


@dataclass(slots=True)
class _Totals:
    prefilled: int = 0
    reused: int = 0
    sampled: int = 0
    steps: int = 0
    preemptions: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0


class Work(NamedTuple):
    """What a step computes."""

    decoding: Collection[Sequence]
    """The crew: of each the id that it sampled last, and its draft."""
    crew: Crew
    chunks: list[tuple[Sequence, int]]
    """The next ids of others."""
    is_lacking: bool
    """Somebody lacks room still."""


class EngineCore:
    """Continuous batching over one runner.

    `vocab_size` is how many ids the tokenizer knows: only those are sampled. `bytes_of` gives an id's bytes, for stop
    strings.
    """

    def __init__(
        self, runner: Runner, spec: EngineSpec, *, vocab_size: int, bytes_of: Callable[[int], bytes],
        clock: Callable[[], float] = time.perf_counter, drafter: Drafter | None = None,
    ) -> None:  # fmt: skip
        self.runner, self.spec, self.vocab_size, self.bytes_of = runner, spec, vocab_size, bytes_of
        self.clock = clock
        self.cache = KVCache(runner.groups, runner.page_size, runner.host, make_policy(spec), clock)
        self.version = 0
        self.waiting = WaitingQueue(clock)
        self.running: list[Sequence] = []
        self.held: list[Sequence] = []
        """Requests that arrived while an update waits for those before them."""
        self.update: Update | None = None
        self.speculator = (
            Speculator(spec.draft_length, spec.draft_branches, drafter, clock) if spec.speculate == "auto" else None
        )
        self._totals = _Totals()
        self._lengths = Lengths()
        self._conversations = Conversations(Readiness(spec.order))
        self._step_seconds = 0.0

    @property
    def is_idle(self) -> bool:
        """No sequence is in flight, no copy and no update."""
        return not (self.waiting or self.running or self.update) and self.cache.tier.is_idle

    def open(self, salt: str = "") -> Lease:
        """A lease for a new session, in the namespace of the present version."""
        return self.cache.open(Namespace(self.version, "", salt))

    def fork(self, parent: Lease, tokens: int) -> Lease:
        """A lease for a session with the first `tokens` ids of `parent`. It shares their KV, or what there is of it, but not
        that of the last: its row may be what the child samples from.

        A parent that is closed took no part in the updates since: what it left belongs to a version that may be over.
        """
        if parent.state is State.CLOSED:
            return self.open(parent.namespace.salt)
        child, copies = self.cache.fork(parent, max(tokens - 1, 0))
        for copy in copies:
            self.runner.copy_page(copy)
        return child

    def submit(self, sequence: Sequence, lease: Lease) -> None:
        """Queue a request. The service has checked that it can be served."""
        self.cache.unpause(lease)
        if lease.state is State.OPEN:
            self.cache.enroll(lease)
        sequence.lease, sequence.arrived, lease.is_wanted = lease, self.clock(), True
        self._conversations.come(sequence, sequence.arrived, self._totals.steps)
        if self.update:
            self.held.append(sequence)
        else:
            self.waiting.add(sequence)
        if self.speculator:
            self.speculator.submitted(sequence)

    def close(self, lease: Lease) -> None:
        """The session is over. Its pages are free or only cached then."""
        self._conversations.forget(lease)
        if self.speculator:
            self.speculator.closed(lease)
        self.cache.close(lease)

    def pause(self, lease: Lease, tool: str, arguments: str = "", deadline: float | None = None) -> None:
        """A tool runs for this session, and is ended in `deadline` seconds at the latest.

        The session's next request keeps its place among those of other sessions.
        """
        now = self.clock()
        self._conversations.pause(lease, self._totals.steps)
        self.cache.pause(lease, Pause(tool, arguments, now, None if deadline is None else now + deadline))

    def progress(self, lease: Lease, eta_seconds: float) -> None:
        """The tool that a session waits for will be done in about so many seconds."""
        if lease.pause is not None:
            lease.pause.eta = self.clock() + eta_seconds

    def stage(self, source: WeightSource) -> Install:
        """`Runner.stage`; tensors named `draft.*` are the draft model's, and are used from the same moment on."""
        drafter = self.speculator.drafter if self.speculator else None
        return stage_together(source, self.runner.stage, drafter.stage if drafter else None)

    def begin_update(self, update: Update) -> None:
        """Change the weights before the next step; in mode `drain` when the requests in flight have ended."""
        assert self.update is None, "one update at a time"
        self.update = update
        self._update_if_due()

    def withdraw(self, update: Update) -> None:
        """Forget an update that still waits; does nothing if it is done."""
        if self.update is update:
            self._end_update(update)

    def abort(self, sequence: Sequence) -> None:
        """End a request in whatever state it is; what it sampled stays. One that has ended already is left alone."""
        if sequence.is_finished:
            return
        sequence.finish_reason = "abort"
        self._leave(sequence)

    def step(self) -> list[Sequence]:
        """Run one step; returns the sequences that ended with it. A pass in which nothing can run returns at once."""
        started = self.clock()
        self._update_if_due()
        self._send_back(self.cache.poll())
        work = self._plan()
        self._grow(work)
        self._start_copies(work.is_lacking)
        if not (work.decoding or work.chunks):
            self._stand_by()
            return []
        self._totals.steps += 1
        sampled_before = self._totals.sampled
        shapes, crew = [(sequence.lease.computed, count) for sequence, count in work.chunks], work.crew
        finished = self._compute(work)
        for sequence in finished:
            self._leave(sequence)
        self._step_seconds = self.clock() - started
        self.cache.costs.note(shapes, self._step_seconds, crew.rows + crew.drafted, crew.keys)
        if self.speculator and crew.rows:
            prompt_rows, sampled = sum(count for _, count in shapes), self._totals.sampled - sampled_before
            self.speculator.stepped(crew.rows, crew.drafted, prompt_rows, sampled, self._step_seconds)
        if self.spec.debug and self.is_idle:
            self.check()
        return finished

    def stop(self) -> None:
        """End what works for it in the background. Nothing is asked of it afterwards."""
        self.runner.host.copier.close()

    def statistics(self, sessions: int) -> EngineStatistics:
        """A snapshot; `sessions` is the service's count."""
        cache, pool, totals, host = self.cache, self.cache.pool, self._totals, self.cache.tier.pools[0]
        return EngineStatistics(
            version=self.version, running=len(self.running), waiting=len(self.waiting), sessions=sessions,
            pages_total=pool.num_pages, pages_free=pool.num_free, pages_cached=pool.num_evictable,
            tokens_prefilled=totals.prefilled, tokens_reused=totals.reused, tokens_sampled=totals.sampled,
            steps=totals.steps, preemptions=totals.preemptions,
            verifications=totals.verifications, tokens_drafted=totals.drafted, tokens_accepted=totals.accepted,
            tokens_reprefilled=cache.num_reprefilled, pages_pinned=cache.num_pinned, sessions_parked=cache.num_parked,
            host_pages_total=host.num_pages, host_pages_free=host.num_free, copies_failed=cache.tier.failed,
        )  # fmt: skip

    def check(self) -> None:
        """Raise `AssertionError` if a page is lost or a sequence is in no queue or in two."""
        self.cache.check()
        if self.speculator:
            self.speculator.check()
        assert not set(map(id, self.waiting)) & set(map(id, self.running)), "a sequence both waits and runs"
        for sequence in self.running:
            assert sequence.lease.is_running, "a running sequence has a lease that may be revoked"

    def _plan(self) -> Work:
        """The next step, with room made for it."""
        hears = self._hears_line()
        line, decoding = self._line() if hears else [], self._decoding()
        if self.speculator:
            self.speculator.propose(decoding)
        while True:
            crew = self._crew(decoding)
            running = [
                self._demand(slot, one, forecast=bool(line))
                for slot, one in enumerate(self.running)
                if one not in decoding
            ]
            returning = self._conversations.returning(self._totals.steps, self._lengths) if line else {}
            expected = list(returning.values())[: self.spec.max_batch]
            plan = plan_step(running, self._demands(line), self._capacity(), expected, crew)
            spared = [self.waiting[slot].lease for slot, _ in plan.admitted]
            if self.cache.policy.spares_returning:
                spared += list(returning)[: plan.num_expected]
            if plan.lacking and not plan.is_stuck:
                spared.append(next(sequence.lease for slot, sequence in line if slot not in dict(plan.admitted)))
            if not plan.lacking or not self._make_room(plan, spared):
                break
            line, decoding = self._line(), self._decoding()
        if hears:
            self.waiting.looked(is_empty=not line, is_lacking=plan.lacking > 0, pages=self.cache.pool.num_available)
        if not plan.has_drafts:
            crew = crew._replace(drafted=0, draft_pages=0)
            for sequence in decoding:
                sequence.draft = NO_DRAFT
        chunks = [(self.running[slot], count) for slot, count in plan.running]
        admitted = self._admit([(self.waiting[slot], count) for slot, count in plan.admitted])
        is_lacking = plan.lacking > 0 or self.waiting.is_refused
        if plan.is_stuck:
            return Work((), NOBODY, [], is_lacking)
        return Work(decoding, crew, chunks + admitted, is_lacking)

    def _decoding(self) -> Collection[Sequence]:
        """Those that decode: the crew."""
        return {one: None for one in self.running if one.is_decoding and one.lease.job is None}

    def _crew(self, decoding: Collection[Sequence]) -> Crew:
        leases, size = [one.lease for one in decoding], self.cache.page_size
        growing = sum(lease.computed == len(lease.pages) * size for lease in leases)
        with_drafts = [one for one in decoding if one.draft.ids]
        drafted, draft_pages = sum(len(one.draft.ids) for one in with_drafts), sum(map(self._draft_pages, with_drafts))
        return Crew(
            len(leases), sum(lease.computed for lease in leases), sum(len(lease.pages) for lease in leases), growing, drafted,
            draft_pages, lambda: growths_of(Growth(one.known, self._growth(one)) for one in decoding),
        )  # fmt: skip

    def _draft_pages(self, sequence: Sequence) -> int:
        """Pages that its draft needs beside those of its own row."""
        lease, size = sequence.lease, self.cache.page_size
        own = max(len(lease.pages), self.cache.pages_for(lease.computed + 1))
        more = max(self.cache.pages_for(lease.computed + 1 + len(sequence.draft.ids)) - own, 0)
        return more + sum(self.cache.pages_for(stop) - start // size for _, start, stop in _branches(sequence))

    def _line(self) -> List[tuple[int, Sequence]]:
        """Those who may be let in next, with their places among all that wait. While nothing runs, that is everybody."""
        waiting, most = self.waiting, self.spec.max_batch
        if not self.running:
            return list(enumerate(waiting[:most]))
        return [(slot, waiting[slot]) for slot in self.cache.inside([one.lease for one in waiting])[:most]]

    def _demands(self, line: List[tuple[int, Sequence]]) -> Line:
        return Line([bool(one.lease.pages) for _, one in line], lambda place: self._demand(*line[place]))

    def _hears_line(self) -> bool:
        """Whether those who wait are to be looked at before the next step."""
        return bool(self.waiting) and (not self.running or self.waiting.is_due(self.cache.pool.num_available))

    def _admit(self, chunks: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Move sequences from waiting to running. What the prefix cache has of them makes their chunks shorter.

        Those whose KV comes back from the host have no chunk in this step.
        """
        admitted = []
        for sequence, count in chunks:
            if not sequence.lease.pages and sequence.lease.high_water:
                self.cache.costs.note_wait(self.clock() - sequence.arrived)
            cached = self.cache.resume(sequence.lease, sequence.tokens.token_ids, sequence.matchable)
            if sequence.cached_tokens < 0:
                sequence.cached_tokens, sequence.started = cached, self.clock()
                self._totals.reused += cached
            self.waiting.remove(sequence)
            self.running.append(sequence)
            if sequence.lease.job is None:
                admitted.append((sequence, min(count, sequence.num_uncomputed)))
        if chunks:
            self.running.sort(key=_rank)
        return admitted

    def _make_room(self, plan: Plan, spared: List[Lease]) -> bool:
        """Free pages for the plan: of idle leases but for `spared`, else of the youngest that runs. False if nothing helps."""
        is_stuck = plan.is_stuck or not (self.running or plan.admitted)
        if self.cache.make_room(plan.lacking, waiting=len(self.waiting), is_stuck=is_stuck, spared=spared):
            return True
        if is_stuck and self.cache.wait_for_parking():
            self._send_back(self.cache.poll())
            return True
        if not plan.is_stuck or len(self.running) < 2:
            return False
        sequence = self.running[-1]
        sequence.preemptions += 1
        self._totals.preemptions += 1
        self._return(sequence)
        self.cache.park(sequence.lease)
        return True

    def _send_back(self, lost: List[Lease]) -> None:
        """Sequences whose KV could not be brought back from the host wait again, to be computed from what there is."""
        if not lost:
            return
        for sequence in [sequence for sequence in self.running if sequence.lease in lost]:
            self._totals.reused -= sequence.cached_tokens
            sequence.cached_tokens = -1
            self._return(sequence)
        for lease in lost:  # also that of a sequence that was aborted before this was heard of
            self.cache.revoke(lease)

    def _return(self, sequence: Sequence) -> None:
        """From running to the waiting line."""
        self.running.remove(sequence)
        if self.speculator:
            self.speculator.returned(sequence)
        self.cache.suspend(sequence.lease, sequence.tokens.token_ids)
        sequence.lease.is_wanted = True
        self.waiting.add(sequence)

    def _grow(self, work: Work) -> None:
        """Pages for what is computed, and tables for the branches of drafts."""
        for sequence in work.decoding:
            self.cache.grow(sequence.lease, sequence.lease.computed + 1 + len(sequence.draft.ids))
            if sequence.draft.parents:
                for copy in self.cache.branch(sequence.lease, _branches(sequence)):
                    self.runner.copy_page(copy)
        for sequence, count in work.chunks:
            self.cache.grow(sequence.lease, sequence.lease.computed + count)
            self._totals.prefilled += 0 if sequence.is_decoding else count

    def _start_copies(self, is_lacking: bool) -> None:
        """Start what the link can take while a step runs; without a step, anything."""
        tier = self.cache.tier
        budget = LINK_SHARE * self._step_seconds * tier.copier.bytes_per_second if self.running else math.inf
        if not is_lacking:
            self.cache.prefetch(budget)
        tier.pump(budget)

    def _stand_by(self) -> None:
        """Nothing can be computed now: wait for a copy. Raises `StallError` if there is none to wait for."""
        if not self.cache.tier.is_idle:
            self.cache.tier.wait(STANDBY_SECONDS)
        elif not self.is_idle:
            raise StallError(
                f"{len(self.waiting)} sequences wait and {len(self.running)} run, but none can go on: {self.cache.describe()}"
            )

    def _compute(self, work: Work) -> list[Sequence]:
        """Run the rows of a step, sample and commit; returns the sequences that end with it."""
        chunks = [*((sequence, 1 + len(sequence.draft.ids)) for sequence in work.decoding), *work.chunks]
        drafter = self.speculator.drafter if self.speculator else None
        if drafter:
            drafter.watch(chunks)
        batch = build_batch(chunks, self.cache.page_size)
        logits_MV = self.runner.run(batch)
        if drafter:
            drafter.take(chunks)
        for sequence, count in chunks:
            self.cache.advance(sequence.lease, sequence.tokens.token_ids, min(count, sequence.num_uncomputed))
        self._read(batch.readers, logits_MV)
        return [sequence for sequence in dict.fromkeys(batch.readers) if sequence.is_finished]

    def _read(self, readers: list[Sequence], logits_MV: Logits) -> None:
        """Sample from each row, or score the id after it."""
        sampling = [row for row, sequence in enumerate(readers) if not sequence.num_scored]
        if len(sampling) < len(readers):
            scoring = [row for row, sequence in enumerate(readers) if sequence.num_scored]
            score(logits_MV[scoring], [readers[row] for row in scoring], self.vocab_size)
            logits_MV = logits_MV[sampling]
        if sampling:
            self._commit([readers[row] for row in sampling], logits_MV)

    def _commit(self, sampling: list[Sequence], logits_MV: Logits) -> None:
        """Append what was sampled; of a sequence with a draft, what stood of that and the id after it."""
        laws = laws_of(sampling, self.vocab_size)
        drawn = sample(logits_MV, sampling, laws, self.vocab_size)
        row = 0
        for sequence in dict.fromkeys(sampling):
            if drafted := len(sequence.draft.ids):
                rows = slice(row, row + 1 + drafted)
                self._commit_draft(sequence, drawn[rows], logits_MV[rows], laws.rules[rows])
            else:
                self._append(sequence, drawn[row])
            row += 1 + drafted

    def _commit_draft(self, sequence: Sequence, drawn: list[Drawn], logits_KV: Logits, rules: list[Rule]) -> None:
        """What follows an end id, a stop string or the last id of a turn is not committed, whoever agreed to it."""
        before, draft, lease = len(sequence.tokens), sequence.draft, sequence.lease
        chosen, stood = committed(sequence, drawn, logits_KV, rules, self.spec.verifier, self.vocab_size)
        for one in chosen:
            if not sequence.is_finished:
                self._append(sequence, one)
        ids = sequence.tokens.token_ids
        stood, kept = stood[: len(ids) - before], max(len(ids) - before - 1, 0)
        if lease.branches:
            last = stood[kept - 1] if kept else -1
            self.cache.join(lease, next((n for n, branch in enumerate(draft.branches()) if last in branch.ids), 0))
        self.cache.advance(lease, ids, kept)
        self.cache.trim(lease)
        assert self.speculator is not None
        self.speculator.verified(sequence, stood)
        self._totals.verifications += 1
        self._totals.drafted += len(draft.ids)
        self._totals.accepted += len(stood)

    def _append(self, sequence: Sequence, drawn: Drawn) -> None:
        """Append one sampled id, or note why there is none."""
        if sequence.num_sampled == 0:
            sequence.first_token = self.clock()
            self.cache.settle(sequence.lease, sequence.tokens.token_ids)
        if drawn.error:
            sequence.error = drawn.error
            return
        text = self.bytes_of(drawn.token_id) if sequence.params.stop else b""
        sequence.raw_logprobs.append(drawn.raw_logprob)
        sequence.kept_logmass.append(drawn.kept_logmass)
        if drawn.top_logprobs:
            sequence.top_logprobs.append(drawn.top_logprobs)
        oldest = sequence.lease.namespace.version
        sequence.oldest_kv = oldest if sequence.oldest_kv is None else min(sequence.oldest_kv, oldest)
        sequence.commit(drawn.token_id, drawn.logprob, self.version, text)
        self._totals.sampled += 1

    def _update_if_due(self) -> None:
        """Install a pending update, unless it waits for requests. Nothing is in the middle of anything here."""
        update = self.update
        if update is None or (update.mode == "drain" and (self.running or self.waiting)):
            return
        started = self.clock()
        try:
            update.install()
        except Exception as error:  # the one that asked for the update is told; the old weights serve on
            update.failure = error
        else:
            self.version = update.version
            update.requests = len(self.running) + len(self.waiting)
            if update.mode != "keep":
                update.tokens_dropped = sum(sequence.lease.computed for sequence in self.running)
                self._requeue(at_the_end=update.mode == "abort_resume")
                for sequence in self.waiting:
                    if sequence.num_scored:
                        sequence.score_anew()
            self.cache.renew(self.version, keep=update.mode == "keep")
            if self.speculator:
                self.speculator.renewed(self.version)
        update.pause_seconds = self.clock() - started
        self._end_update(update)

    def _end_update(self, update: Update) -> None:
        self.update, update.is_done = None, True
        for sequence in self.held:
            self.waiting.add(sequence)
        self.held.clear()

    def _requeue(self, *, at_the_end: bool) -> None:
        """What runs waits to be let in again, with what it has sampled as part of its context."""
        for sequence in list(self.running):
            if at_the_end:
                self._conversations.rank(sequence, self.clock())
            self._return(sequence)

    def _leave(self, sequence: Sequence) -> None:
        queue = next(queue for queue in (self.running, self.waiting, self.held) if sequence in queue)
        queue.remove(sequence)
        self.waiting.look_again()
        sequence.lease.is_wanted = False
        if sequence.lease.is_running:
            self.cache.suspend(sequence.lease, sequence.tokens.token_ids)
        if sequence.error:  # its last id has KV too, and the next request may have to sample from that id's row
            self.cache.drop(sequence.lease)
        self._conversations.turn_ended(sequence)
        sequence.ended = self.clock()
        sequence.kv = sequence.lease.meter.take(sequence.ended)
        if self.speculator:
            self.speculator.left(sequence)
        if sequence.finish_reason != "abort" and not sequence.num_scored:
            self._lengths.add(sequence.num_sampled)

    def _demand(self, slot: int, sequence: Sequence, *, forecast: bool = True) -> Demand:
        """Without a `forecast`, its growth is not looked up: that is asked only for the sake of those who wait."""
        lease = sequence.lease
        growth = self._growth(sequence) if forecast else 0
        group = "" if lease.anchor else sequence.group  # one that had its prompt already waits for nobody's
        if group and self.cache.finds(lease, sequence.tokens.token_ids, sequence.matchable):
            group = ""
        is_loading = lease.job is not None and lease.is_running
        computed = lease.computed if lease.job is None else self.cache.arriving(lease)
        return Demand(slot, sequence.known, computed, len(lease.pages), growth, group, is_loading)

    def _growth(self, sequence: Sequence) -> int:
        """Ids it may sample still, as far as turns show; all that its limit leaves, once it was preempted often."""
        if sequence.preemptions < RESERVE_AFTER:
            return self._lengths.left(sequence.num_sampled, sequence.max_tokens)
        return max(sequence.max_tokens - sequence.num_sampled, 0)

    def _capacity(self) -> Capacity:
        spec, cache = self.spec, self.cache
        return Capacity(
            spec.step_tokens, spec.max_batch, cache.pool.num_available, cache.page_size, self.runner.cost_per_key
        )


def _branches(sequence: Sequence) -> list[tuple[int, int, int]]:
    """Those of its draft beside the first, for `KVCache.branch`."""
    if not sequence.draft.parents:
        return []
    first = sequence.lease.computed + 1
    return [
        (one.parent, first + len(one.above), first + len(one.above) + len(one.ids))
        for one in sequence.draft.branches()[1:]
    ]
