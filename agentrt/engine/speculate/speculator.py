"""`Speculator`: the drafts of an engine's running sequences, before each step, and what became of them after it.

Drafts from text cost next to nothing and are looked for first. A draft model, if there is one, drafts for those sequences of
which it is expected to be accepted more; the gate weighs its passes against that.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as List
from functools import cache
from math import inf

import numpy as np
import structlog
from numpy.typing import NDArray

from agentrt.engine.kv.lease import Lease
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import NO_DRAFT, Draft
from agentrt.engine.speculate.drafter import Drafter
from agentrt.engine.speculate.freshness import Freshness
from agentrt.engine.speculate.gate import Gate
from agentrt.engine.speculate.shadow import Shadow
from agentrt.engine.speculate.suffix import LONGEST, Found, Memory
from agentrt.engine.speculate.survival import Own, Standing
from agentrt.engine.speculate.trial import Trial

TEXT = "text"
MANY = 4
"""Matches."""

log = structlog.get_logger(__name__)


class Speculator:
    """One engine's proposers and gate. The core tells it of every request, step and verification."""

    def __init__(
        self, draft_length: int, branches: int = 1, drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.memory, self.gate, self._clock = Memory(branches=branches), Gate(), clock
        self.draft_length, self.drafter = draft_length, drafter
        self.freshness = Freshness()
        """Of the draft model."""
        self.trial = Trial()
        """Of the draft model, too."""
        self._own: dict[Sequence, dict[str, Own]] = {}
        """How the drafts of each request fare, those from text and those of the model."""
        self._standings: dict[Sequence, Standing] = {}
        self._shadow = Shadow()
        """Of drafts from text."""
        if drafter:
            for count, seconds in drafter.measure().items():
                self.gate.passes.note(count, seconds)

    def submitted(self, sequence: Sequence) -> None:
        """Remember what a conversation heard since its last turn: a prompt, or what a tool gave."""
        tokens, end = sequence.tokens, sequence.context_tokens
        if not sequence.num_scored:
            self._own[sequence], self._standings[sequence] = defaultdict(Own), Standing()
            last_sampled = tokens.mask[:end].tobytes().rfind(b"\1")
            self.memory.add(tokens.token_ids[:end], last_sampled + 1, once=True)
            if self.drafter and self.trial.is_on:
                self.drafter.follow(sequence.lease)

    def computes(self, chunks: List[tuple[Sequence, int]]) -> None:
        """The rows of a step are about to be computed."""
        if self.drafter:
            self.drafter.watch(chunks)

    def computed(self, chunks: List[tuple[Sequence, int]]) -> None:
        """The rows of a step were computed, and nothing of it is committed yet."""
        if self.drafter:
            self.drafter.take(chunks)

    def returned(self, sequence: Sequence) -> None:
        """A sequence waits again, and its KV may go."""
        sequence.draft = NO_DRAFT
        if self.drafter:
            self.drafter.left(sequence)

    def left(self, sequence: Sequence) -> None:
        """Remember what a turn said; siblings, and the next epoch, may say it again."""
        if self.drafter:
            self.drafter.left(sequence)
        if sequence in self._own:
            self._settle(sequence, is_over=True)
            del self._own[sequence], self._standings[sequence]
            self.memory.add(sequence.tokens.token_ids, sequence.context_tokens)

    def closed(self, lease: Lease) -> None:
        """A session is over."""
        if self.drafter:
            self.drafter.forget(lease)

    def renewed(self, version: int) -> None:
        """There are new weights. Text stays: it counts for as much as it is accepted."""
        if self.drafter:
            self.freshness.renewed(is_refreshed=self.drafter.is_refreshed)
            if self.drafter.is_refreshed:
                for kind in (self.drafter.model.kind, _other(self.drafter.model.kind)):
                    self.gate.kinds.pop(kind, None)  # nothing is known of it yet
                self.trial.begin()
            self.drafter.renew(version)
            self.drafter.is_refreshed = False

    def propose(self, running: List[Sequence]) -> None:
        """Give each sequence that decodes the draft that the next step is to verify, if any."""
        self.gate.begin()
        if self.drafter and not self.trial.is_on:
            self.drafter.rest()
        if not self.gate.wakes():
            return
        started = self._clock()
        decoding = [sequence for sequence in running if sequence.is_decoding]
        for sequence in self._shadow.sequences():
            self._settle(sequence)
        drafts = self._from_text(decoding)
        lengths, modelled = [0] * len(decoding), list[int]()
        if decoding and (self.drafter or any(draft.ids for draft in drafts)):
            lengths, modelled = self._chosen(decoding, drafts)
        for sequence, draft, length in zip(decoding, drafts, lengths, strict=True):
            sequence.draft = draft.cut(length) if length else NO_DRAFT
            if draft.ids and not length:
                self._shadow.keep(sequence, draft.first())
        if decoding:
            self.gate.note_look(lengths, self._clock() - started)
        self._draft_by_model([(decoding[slot], lengths[slot]) for slot in modelled if lengths[slot]])

    def stepped(self, requests: int, drafted: int, prompt_rows: int, sampled: int, seconds: float) -> None:
        """A step took so long: requests that decoded, rows of drafts and of prompts beside theirs, ids that were sampled."""
        if self.drafter and not prompt_rows and (plain := self.gate.times.plain.measured(requests)) < inf:
            self.trial.note(plain * sampled / requests, seconds)
        self.gate.note_step(requests, drafted, seconds, prompt_rows)

    def verified(self, sequence: Sequence, stood: List[int]) -> None:
        """The draft of a sequence was verified, and these of its ids stood."""
        draft, accepted = sequence.draft, len(stood)
        sequence.verifications += 1
        sequence.drafted += len(draft.ids)
        sequence.accepted += accepted
        if self.drafter:
            self.drafter.stood(sequence, stood)
        for branch in draft.branches()[1:]:
            if not branch.above or branch.above[-1] in stood:
                in_branch = len(set(branch.ids).intersection(stood))
                self.gate.kinds[_other(draft.kind)].note(len(branch.ids), in_branch)
        self._learn(sequence, draft.first(), len(set(draft.branches()[0].ids).intersection(stood)))
        sequence.draft = NO_DRAFT
        if _source(draft.kind) != TEXT and (stale := self.freshness.note(accepted)):
            log.warning(
                "the draft model is stale: fewer of its ids stand than before the policy changed; train it again",
                accepted_length_before=round(stale.before, 2), accepted_length=round(stale.now, 2),
            )  # fmt: skip

    def check(self) -> None:
        """Raise `AssertionError` if a page of the draft model is lost."""
        if self.drafter:
            self.drafter.cache.check()

    def _settle(self, sequence: Sequence, *, is_over: bool = False) -> None:
        """Learn from a draft of the sequence that was not verified, if it is known by now what of it would have stood."""
        outcome = self._shadow.settle(sequence, is_over=is_over)
        if outcome is not None:
            self._learn(sequence, *outcome)

    def _learn(self, sequence: Sequence, draft: Draft, accepted: int) -> None:
        """The first `accepted` ids of a draft stood, or would have."""
        survival, proposed = self.gate.kinds[draft.kind], len(draft.ids)
        self._own[sequence][_source(draft.kind)].note(accepted, survival.expected(proposed))
        survival.note(proposed, accepted)

    def _from_text(self, sequences: List[Sequence]) -> list[Draft]:
        """What may come next: never more than the turn may still have, the id after the draft included."""
        limits = [self._limit(sequence) for sequence in sequences]
        found = self.memory.find([sequence.tokens.token_ids for sequence in sequences], limits)
        return [
            self._ordered(_drafted(sequence, one)).cut(self.draft_length) if one.ids or one.branches else NO_DRAFT
            for sequence, one in zip(sequences, found, strict=True)
        ]

    def _ordered(self, draft: Draft) -> Draft:
        """The same ids, what is likeliest to stand first."""
        if not draft.parents:
            return draft
        chances = self._chances(draft)
        return draft.ordered(sorted(range(len(chances)), key=lambda place: -chances[place]))

    def _chances(self, draft: Draft) -> list[float]:
        """How often each id of such a draft stands. What is not the first choice is given no more than what is."""
        chances = [0.0] * len(draft.ids)
        for index, branch in enumerate(draft.branches()):
            before = branch.above[-1] if branch.above else -1
            start, most = (chances[before] if branch.above else 1.0), 1.0
            if index:
                most = chances[draft.after(before)[0]]
            curve = self.gate.kinds[_other(draft.kind) if index else draft.kind].curve(self.draft_length)
            for place, survival in zip(branch.ids, curve, strict=False):
                chances[place] = min(start * survival, most)
        return chances

    def _chosen(self, decoding: List[Sequence], drafts: List[Draft]) -> tuple[list[int], list[int]]:
        """How many ids to verify for each; and the slots that the model drafts for, as more of its ids will stand."""
        limits = [len(draft.ids) for draft in drafts]
        survivals_SJ = self._survivals(decoding, TEXT, drafts)
        followed = [slot for slot, one in enumerate(decoding) if self.drafter and self.drafter.follows(one)]
        if self.drafter is None or not followed:
            return self.gate.choose(limits, survivals_SJ, (), self._standing(decoding, limits, survivals_SJ)), []
        kind = self.drafter.model.kind
        mixed, mixed_SJ, modelled = list(limits), survivals_SJ.copy(), []
        by_model_SJ = self._survivals(decoding, kind, [Draft(kind=kind)] * len(decoding))
        for slot in followed:
            limit = self._limit(decoding[slot])
            if by_model_SJ[slot, :limit].sum() > survivals_SJ[slot, : limits[slot]].sum():
                modelled.append(slot)
                mixed[slot], mixed_SJ[slot] = limit, by_model_SJ[slot]
        standings = self._standing(decoding, mixed, mixed_SJ)
        lengths = self.gate.choose(mixed, mixed_SJ, modelled, standings)
        if any(lengths[slot] for slot in modelled) or not modelled:
            return lengths, modelled
        return self.gate.choose(limits, survivals_SJ, (), standings), []

    def _standing(self, sequences: List[Sequence], limits: List[int], survivals_SJ: NDArray[np.float64]) -> list[float]:
        """What drafts of each are worth on average, these ones included."""
        promised = [sum(row[:limit]) for row, limit in zip(survivals_SJ.tolist(), limits, strict=True)]
        mean = sum(promised) / len(promised)
        return [self._standings[one].note(ids, mean) for one, ids in zip(sequences, promised, strict=True)]

    def _survivals(self, sequences: List[Sequence], source: str, drafts: List[Draft]) -> NDArray[np.float64]:
        """How often id j of a draft of each stands, j up to the longest draft; 0 where there is none."""
        rows, none = [], [0.0] * self.draft_length
        for sequence, draft in zip(sequences, drafts, strict=True):
            row = none
            if draft.kind:
                row, factor = self.gate.kinds[draft.kind].curve(self.draft_length), self._own[sequence][source].factor
                if draft.parents:
                    row = (self._chances(draft) + none)[: self.draft_length]
                if factor != 1:
                    row = [min(share * factor, 1.0) for share in row]
            rows.append(row)
        return np.array(rows)

    def _draft_by_model(self, wanted: list[tuple[Sequence, int]]) -> None:
        if self.drafter is None or not wanted:
            return
        started, longest = self._clock(), max(length for _, length in wanted)
        drafts = self.drafter.draft([sequence for sequence, _ in wanted], longest)
        for (sequence, length), draft in zip(wanted, drafts, strict=True):
            sequence.draft = self._ordered(draft).cut(length) if draft.ids else NO_DRAFT
        self.gate.note_passes(len(wanted), longest, self._clock() - started)

    def _limit(self, sequence: Sequence) -> int:
        return max(0, min(self.draft_length, sequence.max_tokens - sequence.num_sampled - 1))


def _drafted(sequence: Sequence, found: Found) -> Draft:
    """What was found, up to an id that ends the turn."""
    stops = sequence.params.stop_token_ids
    ids = first = _until(found.ids, stops)
    parents = list(range(-1, len(first) - 1))
    for leave, others in found.branches:
        if leave <= len(first) and (leave == 0 or first[leave - 1] not in stops):
            others = _until(others, stops)
            parents += [leave - 1, *range(len(ids), len(ids) + len(others) - 1)]
            ids = ids + others
    is_chain = len(ids) == len(first)
    return Draft(tuple(ids), (), _kind(found.matched, found.agreed), () if is_chain else tuple(parents))


def _until(ids: list[int], stops: tuple[int, ...]) -> list[int]:
    """Up to an id that ends the turn."""
    return next((ids[:length] for length, token_id in enumerate(ids, start=1) if token_id in stops), ids)


def _other(kind: str) -> str:
    """Of what is not the first choice in drafts of a kind."""
    return f"{kind}, not the first choice"


def _source(kind: str) -> str:
    return TEXT if kind.startswith(TEXT) else kind


@cache
def _kind(matched: int, agreed: int) -> str:
    """Drafts from text by the length of their match, in octaves, and by how many such matches agreed, if all did."""
    octave = min(matched, LONGEST).bit_length()
    voters = "split" if not agreed else "one match" if agreed == 1 else "few agreed" if agreed < MANY else "many agreed"
    return f"{TEXT}, {voters}, {1 << octave >> 1} and more"
