"""`Drafter`: a draft model beside the engine, its own pages, and how far it is behind each sequence.

A draft model has its own page pool and prefix cache, so the members of a group share the drafted KV of their prompt. A
session that is *followed* has a lease there, which it keeps while its tools run: the next turn finds all rows of the one
before. Nothing of it is needed to go on: where pages are short, idle leases give theirs up, and a sequence without room is
simply not drafted for. An update of the policy clears all of it, since hidden states of the old weights say nothing about
the new ones. The target hands out hidden states in steps that have a followed sequence, and in no others.

    `watch` ─► target step ─► `take` keeps the hidden states of its rows ─► `draft`: rows that are missing, then one row an id
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt.core import seeds
from agentrt.core.spec import EngineSpec
from agentrt.engine.batch import Batch, tables_of
from agentrt.engine.kv.cache import KVCache
from agentrt.engine.kv.group import size_groups
from agentrt.engine.kv.lease import Lease
from agentrt.engine.kv.radix import Namespace
from agentrt.engine.model.causal import CausalModel
from agentrt.engine.model.decoder import Decoder, PagedKV
from agentrt.engine.sampler import Logits, draw, on_host
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import NO_DRAFT, Draft
from agentrt.engine.speculate.head import Step
from agentrt.engine.weights import Install, Shapes, check_weights
from agentrt_kernels.pages import PageLayout
from agentrt_kernels.sample.reference import probabilities
from agentrt_kernels.sample.rules import Rule, Rules

PROBE_COUNTS, PROBE_RUNS = (1, 8), 4
MOST_TAKEN = 512
"""Steps of a sequence whose hidden states are kept while nothing is drafted for it."""


class DraftModel(Protocol):
    """A head (`head.py`) or a small model (`small.py`)."""

    target: Decoder
    """The policy. Set anew with every update of its weights."""

    @property
    def kind(self) -> str: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """After which layers of the target it wants the hidden states."""

    @property
    def ids_V(self) -> Tensor | None:  # noqa: N802 (a shape suffix)
        """The target's id for each of its own; None if they are the same."""

    @property
    def context_length(self) -> int: ...

    @property
    def query_group(self) -> int:
        """Query heads that share a KV head."""

    @property
    def windows(self) -> tuple[int, ...]:
        """Of its cache groups."""

    @property
    def shapes(self) -> Shapes:
        """Of the weights that `stage` takes."""

    def stage(self, weights: Mapping[str, Tensor]) -> Install:
        """Make of new weights all that is needed; they are used when the result is called."""

    def page_layouts(self, page_size: int) -> tuple[PageLayout, ...]: ...

    def fuse(self, taken_NF: Tensor) -> Tensor:
        """The target's hidden states as the `features_ND` of its rows."""

    def forward(
        self, token_ids_N: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_GSP: Tensor, kv: List[PagedKV],
        out_rows_M: Tensor, features_ND: Tensor, *plan: object,
    ) -> Step:  # fmt: skip
        """As `Decoder.forward`; a row says the id that follows it."""


class Tapped(Protocol):
    """What is needed of the target's runner."""

    SPARE_PAGES: int
    """Pages that `run_draft` wants at the end of each pool."""

    decoder: CausalModel
    taps: tuple[int, ...]
    features_NF: Tensor | None
    """Hidden states of the last step's rows, chunk by chunk; None without taps."""

    def handed_out(self, logits_MV: Tensor) -> Logits:
        """Logits where the sampler wants them."""

    def run_draft(self, model: DraftModel, kv: List[PagedKV], batch: Batch, features_ND: Tensor) -> Step:
        """A pass of a draft model over rows in pages of its own; what it gives holds until the next pass."""


@dataclass(eq=False, slots=True)
class _Follower:
    """How the draft model follows one session."""

    lease: Lease
    taken: list[tuple[int, Tensor]] = field(default_factory=list)
    """Hidden states of the target from a position on, of rows that the draft has not seen; later ones hold."""


class _Chain(NamedTuple):
    """The rows with which drafts begin, and what stays the same along them."""

    sequences: list[Sequence]
    ends_S: NDArray[np.int64]
    """The position of the first drafted id."""
    tables_GSP: NDArray[np.int32]
    rules: list[Rule]
    seeds_S: NDArray[np.uint64]


class Drafter:
    """Drafts of one model for one engine. Called between the engine's steps, in its thread."""

    def __init__(self, model: DraftModel, runner: Tapped, spec: EngineSpec, vocab_size: int) -> None:
        """`runner` is the target's: drafts are made on its device, in its type."""
        self.model, self.runner, self.vocab_size = model, runner, vocab_size
        self._device, self._dtype = model.target.device, model.target.dtype
        self.verifier, self.most_rows = spec.verifier, spec.step_tokens
        self.has_second = spec.draft_branches > 1 and spec.verifier == "coupled"
        """Drafts have a second choice of their first id. Other verifiers would need two that are drawn independently."""
        groups, layouts = size_groups(model.windows, spec), model.page_layouts(spec.page_size)
        self.cache = KVCache(groups, spec.page_size)
        self._kv = [
            PagedKV(self._zeros((group.num_pages + runner.SPARE_PAGES) * layout.page_stride), layout)
            for group, layout in zip(groups, layouts, strict=True)
        ]
        self._followers: dict[Sequence, _Follower] = {}
        """Of sequences that are served."""
        self._resting: dict[Lease, _Follower] = {}
        """Of sessions between two turns, or that wait, by their lease with the target."""
        self._version = 0
        self.is_refreshed = False
        """It got new weights with the update of the policy that is being made."""

    def measure(self) -> dict[int, float]:
        """Seconds that an id takes for so many sequences at once. Compiles, on the way."""
        found, width = {}, self.model.target.config.hidden_size
        for count in PROBE_COUNTS:
            rows_S = np.arange(count)
            tables_GSP = np.stack([rows_S % pool.num_pages for pool in self.cache.pools])[..., None].astype(np.int32)
            batch = (rows_S * 0, rows_S * 0, rows_S.astype(np.int32), tables_GSP, rows_S)
            for _ in range(PROBE_RUNS):
                started = time.perf_counter()
                self._forward(*batch, self._zeros(count, width)).logits_MV[0, 0].item()  # waits for a device
                found[count] = time.perf_counter() - started
        return found

    def follow(self, session: Lease) -> None:
        """Drafts are wanted for this session, from its next step on until `forget`. Does nothing if it is followed."""
        if session not in self._resting:
            own = self.cache.open(Namespace(self._version, "", session.namespace.salt))
            self._resting[session] = _Follower(own)

    def follows(self, sequence: Sequence) -> bool:
        """Whether `draft` can draft for it."""
        return sequence in self._followers

    def watch(self, chunks: List[tuple[Sequence, int]]) -> None:
        """The target is about to compute these chunks."""
        is_watched = False
        for sequence, _ in chunks:
            follower = self._resting.pop(sequence.lease, None)
            if follower is not None:
                self._followers[sequence] = follower
            is_watched = is_watched or sequence in self._followers
        self.runner.taps = self.model.taps if is_watched else ()

    def take(self, chunks: List[tuple[Sequence, int]]) -> None:
        """The target computed these chunks. To be called before what was sampled in them is committed.

        Of rows that nobody follows nothing is kept, and of a prompt's nothing beside another sequence's.
        """
        features_NF = self.runner.features_NF
        if features_NF is None:
            return
        rows = np.cumsum([0, *(count for _, count in chunks)])
        followed = [
            (follower, sequence.lease.computed, int(row), count)
            for (sequence, count), row in zip(chunks, rows, strict=False)
            if (follower := self._followers.get(sequence))
        ]
        singles = torch.tensor([row for _, _, row, count in followed if count == 1], dtype=torch.int64)
        of_singles = iter(torch.split(features_NF[singles.to(self._device, non_blocking=True)], 1))
        for follower, position, row, count in followed:
            part = next(of_singles) if count == 1 else features_NF[row : row + count].clone()
            follower.taken.append((position, part))
            if len(follower.taken) > MOST_TAKEN:
                del follower.taken[0]

    def stood(self, sequence: Sequence, places: List[int]) -> None:
        """Of the draft that the last step verified these ids stood, so of its rows no others are needed."""
        follower = self._followers.get(sequence)
        if follower is not None and follower.taken:
            position, part = follower.taken[-1]
            order = sequence.draft.order()
            rows = torch.tensor([0, *(1 + order.index(place) for place in places)])
            follower.taken[-1] = position, part[rows.to(self._device, non_blocking=True)]

    def draft(self, sequences: List[Sequence], length: int) -> list[Draft]:
        """For each sequence up to `length` ids, and behind them maybe a second choice of the first; none for one that lacks
        pages, or is still too far ahead.

        All are followed, and each has sampled all but the KV of its last id.
        """
        drafts = dict.fromkeys(sequences, NO_DRAFT)
        ready = [sequence for sequence in sequences if self._has_room(sequence, length)]
        step, chain = self._catch_up(ready)
        if chain is None:
            return list(drafts.values())
        ids: list[NDArray[np.int64]] = []
        q: list[list[NDArray[np.float64]]] = []
        second_S: NDArray[np.int64] | None = None
        while True:
            logits_SV = self._whole(step.logits_MV)
            drawn_S, q_S = self._drawn(chain, logits_SV, len(ids))
            if self.has_second and not ids:
                second_S, _ = self._drawn(chain, _without(logits_SV, drawn_S), 0)
            ids.append(drawn_S)
            q.append(q_S)
            if len(ids) == length:
                break
            step = self._next(chain, step, drawn_S, len(ids) - 1)
        for slot, sequence in enumerate(chain.sequences):
            own = tuple(int(drawn_S[slot]) for drawn_S in ids)
            own_q = () if self.verifier == "coupled" else tuple(q_S[slot] for q_S in q)
            draft = _sound(Draft(own, own_q, self.model.kind), sequence.params.stop_token_ids)
            drafts[sequence] = draft if second_S is None else _with_second(draft, int(second_S[slot]))
        return list(drafts.values())

    def left(self, sequence: Sequence) -> None:
        """The sequence ended or waits again. Its session is followed on."""
        follower = self._followers.pop(sequence, None)
        if follower is not None:
            if follower.lease.is_running:
                self.cache.suspend(follower.lease, sequence.tokens.token_ids)
            self._resting[sequence.lease] = follower

    def rest(self) -> None:
        """No drafts are wanted for anybody. What a session had is gone; it can be followed anew."""
        for sequence in list(self._followers):
            self.left(sequence)
        for session in list(self._resting):
            self.forget(session)

    def forget(self, session: Lease) -> None:
        """No drafts are wanted any more for a session of which nothing runs. Does nothing if it is not followed."""
        follower = self._resting.pop(session, None)
        if follower is not None:
            self.cache.close(follower.lease)

    def stage(self, weights: Mapping[str, Tensor]) -> Install:
        """New weights for the model itself, to be used from the same moment as the policy's. Raises `WeightsError`."""
        check_weights(weights, self.model.shapes)
        install = self.model.stage(weights)

        def refresh() -> None:
            install()
            self.is_refreshed = True

        return refresh

    def renew(self, version: int) -> None:
        """There is a new policy: nothing that was drafted for the old one is used again."""
        for sequence in list(self._followers):
            self.left(sequence)
        for follower in self._resting.values():
            follower.taken.clear()
        self.cache.renew(version)
        assert isinstance(self.runner.decoder, Decoder), "other models have no draft model"
        self._version, self.model.target = version, self.runner.decoder

    def _has_room(self, sequence: Sequence, length: int) -> bool:
        """Whether the sequence and a draft of `length` fit; if so, their pages are taken, from idle leases if need be."""
        lease, ids = self._followers[sequence].lease, sequence.tokens.token_ids
        places = len(ids) + length - 1
        if not lease.is_running and lease.pages:
            self.cache.resume(lease, ids, len(ids) - 1)
        missing = self.cache.pages_for(places) - len(lease.pages)
        while any(missing > pool.num_available for pool in self.cache.pools):
            if not self.cache.revoke_idle():
                return False
        if not lease.is_running:
            self.cache.resume(lease, ids, len(ids) - 1)
        self.cache.grow(lease, places)
        return True

    def _catch_up(self, sequences: List[Sequence]) -> tuple[Step, _Chain | None]:
        """Compute the rows that are missing, the oldest sequence's first; those whose last row is among them go on."""
        token_ids, positions, tables, features, out, kept = [], [], [], [], [], []
        rows = 0
        for sequence in sequences:
            follower = self._followers[sequence]
            start, ids = follower.lease.computed, sequence.tokens.token_ids
            stop = min(len(ids), start + max(self.most_rows - rows, 0))
            if stop == start:
                break
            token_ids.append(np.array(ids[start:stop], dtype=np.int64))
            positions.append(np.arange(start, stop))
            tables.append(follower.lease.table)
            features.append(self._features(follower, start, stop))
            rows += stop - start
            if stop == len(ids):
                out.append(rows - 1)
                kept.append(len(tables) - 1)
            self.cache.advance(follower.lease, ids, stop - start)
            self.cache.settle(follower.lease, ids)
        if not rows:
            return Step(torch.empty(0), None), None
        table_of_N = np.repeat(np.arange(len(tables), dtype=np.int32), [len(part) for part in positions])
        tables_GSP = tables_of(tables)
        step = self._forward(
            np.concatenate(token_ids), np.concatenate(positions), table_of_N, tables_GSP, np.array(out, dtype=np.int64),
            torch.cat(features) if self.model.taps else torch.empty(0),
        )  # fmt: skip
        going = [sequences[slot] for slot in kept]
        return step, self._chain(going, np.ascontiguousarray(tables_GSP[:, kept])) if going else None

    def _features(self, follower: _Follower, start: int, stop: int) -> Tensor:
        """Of rows `start` to `stop`: row j takes what the target made of id j - 1; zeros where that is not known."""
        if not self.model.taps:
            return torch.empty(0)
        width = self.model.target.config.hidden_size
        features_ND = self._zeros(stop - start, width)
        for position, taken_NF in follower.taken:
            first, last = max(position + 1, start), min(position + 1 + len(taken_NF), stop)
            if first < last:
                fused_ND = self.model.fuse(taken_NF[first - position - 1 : last - position - 1].contiguous())
                features_ND[first - start : last - start] = fused_ND
        follower.taken = [one for one in follower.taken if one[0] + len(one[1]) >= stop]
        return features_ND

    def _chain(self, sequences: list[Sequence], tables_GSP: NDArray[np.int32]) -> _Chain:
        """Chance: under `coupled` the noise of the target's own draw, so that alike laws draw alike ids.

        The other verifiers need drafts that are drawn with chance that nobody else uses.
        """
        lengths = [len(sequence.tokens) for sequence in sequences]
        keys = [sequence.seed for sequence in sequences]
        if self.verifier != "coupled":
            keys = [seeds.derive(seed, "draft", length) for seed, length in zip(keys, lengths, strict=True)]
        rules = [
            Rule(one.params.temperature, one.params.top_k, one.params.top_p, one.params.min_p) for one in sequences
        ]
        return _Chain(sequences, np.array(lengths), tables_GSP, rules, np.array(keys, dtype=np.uint64))

    def _drawn(
        self, chain: _Chain, logits_SV: Tensor, depth: int
    ) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        """An id for each sequence, and the distribution that it was drawn from; -1 where there is none."""
        logits = self.runner.handed_out(logits_SV)
        drawn = draw(logits, self.vocab_size, Rules.of(chain.rules), chain.seeds_S, chain.ends_S + depth)
        if self.verifier == "coupled":
            return drawn.ids_B, []
        rows_SV = on_host(logits)
        laws = (probabilities(row_V, rule, self.vocab_size) for row_V, rule in zip(rows_SV, chain.rules, strict=True))
        return drawn.ids_B, list(laws)

    def _whole(self, logits_SV: Tensor) -> Tensor:
        """The draft's logits by the target's ids."""
        if self.model.ids_V is None:
            return logits_SV
        whole_SV = logits_SV.new_full((len(logits_SV), self.model.target.vocab_size), -torch.inf)
        whole_SV[:, self.model.ids_V] = logits_SV
        return whole_SV

    def _next(self, chain: _Chain, step: Step, drawn_S: NDArray[np.int64], depth: int) -> Step:
        """The row of each drafted id. Where others draft on beyond a sequence's context, it stays at the last position."""
        count = len(drawn_S)
        features = torch.empty(0) if step.features_MD is None else step.features_MD
        rows_S, positions_S = np.arange(count), np.minimum(chain.ends_S + depth, self.model.context_length - 1)
        return self._forward(
            np.maximum(drawn_S, 0), positions_S, rows_S.astype(np.int32), chain.tables_GSP, rows_S, features
        )

    def _forward(
        self, token_ids_N: NDArray[np.int64], positions_N: NDArray[np.int64], table_of_N: NDArray[np.int32],
        tables_GSP: NDArray[np.int32], out_rows_M: NDArray[np.int64], features_ND: Tensor,
    ) -> Step:  # fmt: skip
        batch = Batch(token_ids_N, positions_N, table_of_N, tables_GSP, out_rows_M, [])
        return self.runner.run_draft(self.model, self._kv, batch, features_ND)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


def _without(logits_SV: Tensor, ids_S: NDArray[np.int64]) -> Tensor:
    """The logits with that of one id a row taken out."""
    ids_S1 = torch.from_numpy(np.maximum(ids_S, 0))[:, None].to(logits_SV.device)
    return logits_SV.scatter(1, ids_S1, -torch.inf)


def _with_second(draft: Draft, token_id: int) -> Draft:
    """The same chain, and another id that may come first."""
    if token_id < 0 or not draft.ids:
        return draft
    return draft._replace(ids=(*draft.ids, token_id), parents=(*range(-1, len(draft.ids) - 1), -1))


def _sound(draft: Draft, stop_token_ids: tuple[int, ...]) -> Draft:
    """Up to an id that ends the turn, and before one that could not be drawn."""
    for depth, token_id in enumerate(draft.ids):
        if token_id < 0:
            return draft.cut(depth)
        if token_id in stop_token_ids:
            return draft.cut(depth + 1)
    return draft
