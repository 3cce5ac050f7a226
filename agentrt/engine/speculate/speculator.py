"""`Speculator`: the drafts of an engine's running sequences, before each step, and what became of them after it."""

import time
from collections.abc import Sequence as List
from functools import cache

from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import NO_DRAFT, Draft
from agentrt.engine.speculate.gate import REQUEST_PRIOR, Gate, Rate
from agentrt.engine.speculate.suffix import LONGEST, Memory


class Speculator:
    """One engine's proposer and gate. The core tells it of every request, step and verification."""

    def __init__(self, draft_length: int) -> None:
        self.memory, self.gate, self.draft_length = Memory(), Gate(), draft_length
        self._rates: dict[Sequence, Rate] = {}
        """Of the drafts of each running request."""

    def submitted(self, sequence: Sequence) -> None:
        """Remember what a conversation heard since its last turn: a prompt, or what a tool gave."""
        tokens, end = sequence.tokens, sequence.context_tokens
        if not sequence.num_scored:
            self._rates[sequence] = Rate()
            last_sampled = tokens.mask[:end].tobytes().rfind(b"\1")
            self.memory.add(tokens.token_ids[:end], last_sampled + 1, once=True)

    def left(self, sequence: Sequence) -> None:
        """Remember what a turn said; siblings, and the next epoch, may say it again."""
        if self._rates.pop(sequence, None):
            self.memory.add(sequence.tokens.token_ids, sequence.context_tokens)

    def propose(self, running: List[Sequence]) -> None:
        """Give each sequence that decodes the draft that the next step is to verify, if any."""
        if not self.gate.wakes():
            return
        started = time.perf_counter()
        decoding = [sequence for sequence in running if sequence.is_decoding]
        drafts = [self._draft(sequence) for sequence in decoding]
        rates = [self._rate(sequence, draft) for sequence, draft in zip(decoding, drafts, strict=True)]
        lengths = self.gate.choose([len(draft.ids) for draft in drafts], rates)
        for sequence, draft, length in zip(decoding, drafts, lengths, strict=True):
            sequence.draft = draft.cut(length) if length else NO_DRAFT
        if decoding:
            self.gate.note_look(lengths, time.perf_counter() - started)

    def verified(self, sequence: Sequence, accepted: int) -> None:
        """The draft of a sequence was verified, and its first `accepted` ids stood."""
        proposed = len(sequence.draft.ids)
        sequence.verifications += 1
        sequence.drafted += proposed
        sequence.accepted += accepted
        for rate in (self.gate.rates[sequence.draft.kind], self._rates[sequence]):
            rate.note(proposed, accepted)
        sequence.draft = NO_DRAFT

    def _draft(self, sequence: Sequence) -> Draft:
        """What may come next: never more than the turn may still have, the id after the draft included."""
        limit = min(self.draft_length, sequence.max_tokens - sequence.num_sampled - 1)
        if limit < 1:
            return NO_DRAFT
        found = self.memory.find(sequence.tokens.token_ids, limit)
        ids = found.ids
        for length, token_id in enumerate(ids, start=1):
            if token_id in sequence.params.stop_token_ids:
                ids = ids[:length]
                break
        return Draft(tuple(ids), kind=_kind(found.matched, found.agreed))

    def _rate(self, sequence: Sequence, draft: Draft) -> float:
        return self._rates[sequence].mean(self.gate.rates[draft.kind].mean(), REQUEST_PRIOR)


@cache
def _kind(matched: int, agreed: bool) -> str:
    """Drafts from text by the length of their match, in octaves, and whether the matches agreed."""
    octave = min(matched, LONGEST).bit_length()
    return f"text, {'agreed' if agreed else 'split'}, {1 << octave >> 1} and more"
