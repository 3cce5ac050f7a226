"""What speculation did, over all turns and by policy version."""

from agentrt.core.records import BranchRecord, EpisodeRecord, Fork, StopReason, TurnRecord
from agentrt.core.tokens import Floats, Ids, Mask
from agentrt.report.drafts import speculation


def branch(name: str, versions: list[int], *turns: TurnRecord, fork: Fork | None = None) -> BranchRecord:
    size = len(versions)
    return BranchRecord(
        name=name, fork=fork, token_ids=Ids(range(size)), mask=Mask(version >= 0 for version in versions),
        logprobs=Floats([0.0] * size), versions=Ids(versions), turns=list(turns),
    )  # fmt: skip


def turn(start: int, end: int, verifications: int = 0, drafted: int = 0, accepted: int = 0) -> TurnRecord:
    return TurnRecord(
        start=start, end=end, seed=0, finish_reason="stop", decode_seconds=1.0, queue_seconds=0.5,
        verifications=verifications, drafted_tokens=drafted, accepted_tokens=accepted,
    )  # fmt: skip


def record(*branches: BranchRecord) -> EpisodeRecord:
    return EpisodeRecord(
        task_id="t", member=0, attempt=0, seed=1, status="ok", stop_reason=StopReason.COMPLETED, truncated=False,
        reward=1.0, branches=list(branches),
    )  # fmt: skip


def test_by_the_version_that_began_a_turn_and_over_all() -> None:
    main = branch("main", [-1, 0, 0, -1, 1], turn(1, 3, 2, 8, 3), turn(4, 5))
    fork = branch("other", [-1, 1], turn(4, 5, 1, 4, 4), fork=Fork("main", 3))
    found = speculation([record(main, fork)])
    assert list(found) == ["all", "version 0", "version 1"]
    assert [(one.proposed_length, one.accepted_length, one.verifications) for one in found.values()] == [
        (4.0, 7 / 3, 3), (4.0, 1.5, 2), (4.0, 4.0, 1)
    ]  # fmt: skip
    assert (found["all"].generation_seconds, found["all"].total_seconds) == (3.0, 4.5)


def test_a_turn_without_an_id_is_of_no_version() -> None:
    """One that was ended before its first: it may be at the end of its branch, where no id has a version."""
    main = branch("main", [-1, 0], turn(1, 2, 1, 2, 1), turn(2, 2))
    assert list(speculation([record(main)])) == ["all"]
    assert speculation([record(branch("main", [-1], turn(1, 1)))]) == {}
