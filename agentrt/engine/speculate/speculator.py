"""`Speculator`: the drafts of an engine's running sequences, before each step, and what became of them after it.

Drafts from text cost next to nothing and are looked for first. A draft model, if there is one, drafts for those sequences of
which it is expected to be accepted more; the gate weighs its passes against that. While the gate sleeps, nothing is done here
for any sequence that runs.
"""

import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as List
from math import inf

import numpy as np
import structlog

from agentrt.engine.kv.lease import Lease
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import NO_DRAFT, Draft
from agentrt.engine.speculate.drafter import Drafter
from agentrt.engine.speculate.freshness import Freshness
from agentrt.engine.speculate.gate import Gate, Terms, evenness
from agentrt.engine.speculate.suffix import KINDS, NOTHING, Found, Memory
from agentrt.engine.speculate.survival import Survival
from agentrt.engine.speculate.trial import Trial

EVENNESS_EVERY = 8
"""Looks."""
ROW_OF = {kind: row for row, kind in enumerate(KINDS)}

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
        self._survivals_KJ = np.array([Survival().curve(draft_length)] * len(KINDS))
        """What the gate knows of drafts from text."""
        self._looks = 0
        self._accepted = 0
        """Ids of this step's drafts that stood."""
        if drafter:
            for count, seconds in drafter.measure().items():
                self.gate.passes.note(count, seconds)

    def submitted(self, sequence: Sequence) -> None:
        """Remember what a conversation heard since its last turn: a prompt, or what a tool gave."""
        if not sequence.num_scored:
            last_sampled = sequence.tokens.mask.tobytes().rfind(b"\1")
            self.memory.add(sequence.tokens.token_ids, last_sampled + 1, once=True)
            if self.drafter and self.trial.is_on:
                self.drafter.follow(sequence.lease)

    def returned(self, sequence: Sequence) -> None:
        """A sequence waits again, and its KV may go."""
        sequence.draft = NO_DRAFT
        if self.drafter:
            self.drafter.left(sequence)

    def left(self, sequence: Sequence) -> None:
        """Remember what a turn said; siblings, and the next epoch, may say it again."""
        if self.drafter:
            self.drafter.left(sequence)
        if not sequence.num_scored:
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

    def propose(self, decoding: Collection[Sequence]) -> None:
        """Give these, which decode, the drafts that the next step is to verify, if any."""
        if self.drafter and not self.trial.is_on:
            self.drafter.rest()
        if self.gate.wakes() and decoding:
            started = self._clock()
            modelled = self._choose(decoding)
            self.gate.note_look(self._clock() - started)
            self._draft_by_model(modelled)

    def stepped(self, requests: int, drafted: int, prompt_rows: int, sampled: int, seconds: float) -> None:
        """A step took so long: requests that decoded, rows of drafts and of prompts beside theirs, ids that were sampled."""
        if self.drafter and not prompt_rows and (plain := self.gate.times.plain.measured(requests)) < inf:
            self.trial.note(plain * sampled / requests, seconds)
        self.gate.note_step(requests, drafted, self._accepted, seconds, prompt_rows)
        self._accepted = 0

    def verified(self, sequence: Sequence, stood: List[int]) -> None:
        """The draft of a sequence was verified, and these of its ids stood."""
        draft, accepted = sequence.draft, len(stood)
        sequence.verifications += 1
        sequence.drafted += len(draft.ids)
        sequence.accepted += accepted
        self._accepted += accepted
        if self.drafter:
            self.drafter.stood(sequence, stood)
        if draft.parents:
            self._learn_of_branches(draft, stood)
        else:
            self._learn(draft.kind, len(draft.ids), accepted)
        sequence.draft = NO_DRAFT
        if self.drafter and draft.kind not in ROW_OF and (stale := self.freshness.note(accepted)):
            log.warning(
                "the draft model is stale: fewer of its ids stand than before the policy changed; train it again",
                accepted_length_before=round(stale.before, 2), accepted_length=round(stale.now, 2),
            )  # fmt: skip

    def check(self) -> None:
        """Raise `AssertionError` if a page of the draft model is lost."""
        if self.drafter:
            self.drafter.cache.check()

    def _learn(self, kind: str, proposed: int, accepted: int) -> None:
        """The first `accepted` ids of a draft stood."""
        survival = self.gate.kinds[kind]
        if survival.note(proposed, accepted) and kind in ROW_OF:
            self._survivals_KJ[ROW_OF[kind]] = survival.curve(self.draft_length)

    def _learn_of_branches(self, draft: Draft, stood: List[int]) -> None:
        """These ids of a draft stood; of a branch that leaves the sequence's text nothing is known."""
        for index, branch in enumerate(draft.branches()):
            if not branch.above or branch.above[-1] in stood:
                kind, accepted = _other(draft.kind) if index else draft.kind, set(branch.ids).intersection(stood)
                self._learn(kind, len(branch.ids), len(accepted))

    def _choose(self, decoding: Collection[Sequence]) -> dict[Sequence, int]:
        """Give each its draft from text, if that pays; those that the model is to draft for, and how many ids."""
        self._looks += 1
        if self._looks % EVENNESS_EVERY == 0:
            self.gate.even = evenness([one.accepted for one in decoding], [one.num_sampled for one in decoding])
        terms = self.gate.terms(len(decoding), self.draft_length)
        drafts = self._from_text(decoding, terms)
        modelled, pays = dict[Sequence, int](), False
        if drafts or self.drafter:
            bring = {sequence: self._expected(draft) for sequence, draft in drafts.items()}
            ids, rows = sum(bring.values()), sum(len(draft.ids) for draft in drafts.values())
            pays = self.gate.pays(ids, rows)
            if self.drafter:
                modelled = self._modelled(decoding, drafts, bring, terms, self.gate.saves(ids, rows) if pays else -inf)
        if pays or modelled:
            for sequence, draft in drafts.items():
                sequence.draft = NO_DRAFT if sequence in modelled else draft
        return modelled

    def _from_text(self, sequences: Collection[Sequence], terms: Terms) -> dict[Sequence, Draft]:
        """What may come next of those of which something is known: never more than the turn may still have, the id after the
        draft included.
        """
        texts, longest = [one.tokens.token_ids for one in sequences], terms.longest
        limits = [
            min(longest, one.context_tokens + one.max_tokens - len(ids) - 1)
            for one, ids in zip(sequences, texts, strict=True)
        ]
        found = self.memory.find(texts, limits, self._survivals_KJ, terms.least())
        return {
            sequence: draft
            for sequence, one in zip(sequences, found, strict=True)
            if one is not NOTHING and (draft := self._cut(_drafted(sequence, one), terms)).ids
        }

    def _modelled(
        self, decoding: Collection[Sequence], drafts: Mapping[Sequence, Draft], bring: Mapping[Sequence, float], terms: Terms,
        saved: float,
    ) -> dict[Sequence, int]:  # fmt: skip
        """Those of which more ids of the model will stand than of these drafts, which `bring` so many, if that saves more."""
        followed = [one for one in decoding if self.drafter and self.drafter.follows(one)]
        if self.drafter is None or not followed:
            return {}
        curve = self.gate.kinds[self.drafter.model.kind].curve(self.draft_length)[: terms.longest]
        least = terms.least(self.gate.passes.of(len(followed)) / len(followed))
        length = sum(share >= least for share in curve)
        lengths = {one: min(self._limit(one), length) for one in followed}
        lengths = {one: most for one, most in lengths.items() if sum(curve[:most]) > bring.get(one, 0.0)}
        if not lengths:
            return {}
        others = {one: draft for one, draft in drafts.items() if one not in lengths}
        ids = sum(bring[one] for one in others) + sum(sum(curve[:most]) for most in lengths.values())
        rows = sum(len(draft.ids) for draft in others.values()) + sum(lengths.values())
        seconds = self.gate.passes.of(len(lengths)) * max(lengths.values())
        is_better = self.gate.pays(ids, rows, seconds) and self.gate.saves(ids, rows, seconds) >= saved
        return lengths if is_better else {}

    def _expected(self, draft: Draft) -> float:
        """How many ids of a draft will stand."""
        if draft.parents:
            return sum(self._chances(draft))
        return sum(self.gate.kinds[draft.kind].curve(self.draft_length)[: len(draft.ids)])

    def _cut(self, draft: Draft, terms: Terms) -> Draft:
        """Its ids that are worth their rows. Those of a chain from text are already."""
        if not draft.parents:
            return draft
        draft = self._ordered(draft).cut(terms.longest)
        return draft.cut(sum(chance >= terms.least() for chance in self._chances(draft)))

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

    def _draft_by_model(self, wanted: Mapping[Sequence, int]) -> None:
        if self.drafter is None or not wanted:
            return
        started, longest = self._clock(), max(wanted.values())
        drafts = self.drafter.draft(list(wanted), longest)
        for (sequence, length), draft in zip(wanted.items(), drafts, strict=True):
            sequence.draft = self._ordered(draft).cut(length) if draft.ids else NO_DRAFT
        self.gate.note_passes(len(wanted), longest, self._clock() - started)

    def _limit(self, sequence: Sequence) -> int:
        return max(0, min(self.draft_length, sequence.max_tokens - sequence.num_sampled - 1))


def _drafted(sequence: Sequence, found: Found) -> Draft:
    """What was found, up to an id that ends the turn. That id would bring nothing: the row before it samples it anyway, and
    nobody asks what follows it.
    """
    stops = sequence.params.stop_token_ids
    ids = first = _before(found.ids, stops)
    if not found.branches:
        return Draft(tuple(ids), (), found.kind)
    parents = list(range(-1, len(first) - 1))
    for leave, others in found.branches:
        if leave <= len(first) and (others := _before(others, stops)):
            parents += [leave - 1, *range(len(ids), len(ids) + len(others) - 1)]
            ids = ids + others
    is_chain = len(ids) == len(first)
    return Draft(tuple(ids), (), found.kind, () if is_chain else tuple(parents))


def _before(ids: list[int], stops: tuple[int, ...]) -> list[int]:
    """Up to an id that ends the turn."""
    for place, token_id in enumerate(ids):
        if token_id in stops:
            return ids[:place]
    return ids


def _other(kind: str) -> str:
    """Of what is not the first choice in drafts of a kind."""
    return f"{kind}, not the first choice"
