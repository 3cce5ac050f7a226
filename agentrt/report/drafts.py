"""What speculation did: lengths and times, over turns and by the policy version that sampled them."""

from collections.abc import Iterable

import msgspec

from agentrt.core.records import EpisodeRecord, TurnRecord


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Over some turns. Compare the times with those of the same run under `engine.speculate=off`, which says the same."""

    proposed_length: float
    """Ids of a draft that was verified, on average."""
    accepted_length: float
    """Those of them that stood; the id that follows them is not counted."""
    generation_seconds: float
    """From the first sampled id of a turn to its last, summed over turns, which overlap."""
    total_seconds: float
    """Of the whole turns: queue and prefill too."""
    verifications: int


def speculation(records: Iterable[EpisodeRecord]) -> dict[str, Speculation]:
    """Of all turns as `all`, and by the policy version that began them if there are several; empty without drafts."""
    turns: dict[str, list[TurnRecord]] = {}
    for record in records:
        for branch in record.branches:
            start = branch.fork.at if branch.fork else 0
            for turn in branch.turns:
                if turn.end == turn.start:  # it was ended before its first id
                    continue
                version = f"version {branch.versions[turn.start - start]}"
                turns.setdefault(version, []).append(turn)
    everything = [turn for some in turns.values() for turn in some]
    if not any(turn.verifications for turn in everything):
        return {}
    parts = {"all": everything} | (turns if len(turns) > 1 else {})
    return {name: _figures(some) for name, some in parts.items()}


def _figures(turns: list[TurnRecord]) -> Speculation:
    verifications = sum(turn.verifications for turn in turns)
    return Speculation(
        proposed_length=sum(turn.drafted_tokens for turn in turns) / max(verifications, 1),
        accepted_length=sum(turn.accepted_tokens for turn in turns) / max(verifications, 1),
        generation_seconds=sum(turn.decode_seconds for turn in turns),
        total_seconds=sum(turn.queue_seconds + turn.prefill_seconds + turn.decode_seconds for turn in turns),
        verifications=verifications,
    )
