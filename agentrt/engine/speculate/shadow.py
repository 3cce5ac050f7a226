"""`Shadow`: drafts that no step verified, held against what was sampled instead. Pure.

An id that was sampled anyway says as much of a draft as one that was drawn in its place, and costs no row. So a gate that
is shut knows what its drafts would be worth as well as an open one: under `coupled` they stand exactly where the ids are
the same, under the other verifiers just as often, for drafts from text.
"""

from typing import NamedTuple

from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import Draft


class Outcome(NamedTuple):
    """What came of a draft."""

    draft: Draft
    """As far as it is known what stands."""
    accepted: int
    """Ids that would have stood."""


class Shadow:
    """One draft of each sequence at most."""

    def __init__(self) -> None:
        self._drafts: dict[Sequence, tuple[int, Draft]] = {}
        """And the position of its first id."""

    def sequences(self) -> list[Sequence]:
        """Those of which a draft is held against what comes."""
        return list(self._drafts)

    def keep(self, sequence: Sequence, draft: Draft) -> None:
        """This chain may follow what the sequence has now. Does nothing while something else is held against it."""
        self._drafts.setdefault(sequence, (len(sequence.tokens), draft))

    def settle(self, sequence: Sequence, *, is_over: bool = False) -> Outcome | None:
        """What came of its draft; None while that is not known. It `is_over` if nothing more will be sampled."""
        if sequence not in self._drafts:
            return None
        start, draft = self._drafts[sequence]
        sampled = sequence.tokens.token_ids[start : start + len(draft.ids)]
        accepted = len(draft.walk(sampled))
        is_known = accepted < len(sampled) or accepted == len(draft.ids)
        if not is_known and not is_over:
            return None
        del self._drafts[sequence]
        return Outcome(draft if is_known else draft.cut(accepted), accepted)
