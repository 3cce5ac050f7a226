"""Groups as a trainer's arrays: padded and ragged hold the same, forks are trained on once, members without a reward never."""

import numpy as np
import pytest

from agentrt.core.records import BranchRecord, EpisodeRecord, Failure, Fork, StopReason
from agentrt.core.tokens import Floats, Ids, Mask
from agentrt.rollout.batch import padded, ragged
from agentrt.rollout.group import Group, group_record


def branch(name: str, mask: list[int], version: int = 0, fork: Fork | None = None) -> BranchRecord:
    return BranchRecord(
        name=name, fork=fork, token_ids=Ids(range(10, 10 + len(mask))), mask=Mask(mask),
        logprobs=Floats([-0.5 * bit for bit in mask]), versions=Ids([version if bit else -1 for bit in mask]),
    )  # fmt: skip


def episode(member: int, reward: float | None, *branches: BranchRecord) -> EpisodeRecord:
    failure = Failure(boundary="engine", type="E", message="m") if reward is None else None
    return EpisodeRecord(
        task_id="t", member=member, attempt=0, seed=1, status="error" if failure else "ok", error=failure,
        stop_reason=StopReason.COMPLETED, truncated=False, reward=reward, branches=list(branches),
        messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], metrics={"turns": 1.0},
    )  # fmt: skip


def group_of(*episodes: EpisodeRecord) -> Group:
    return Group(group_record("t", [one.reward for one in episodes]), episodes)


FORKED = episode(0, 1.0, branch("main", [0, 1, 1], 2), branch("critic", [0, 1], 3, Fork("main", 2)))
WRONG = episode(1, 0.0, branch("main", [0, 0, 0, 1, 0, 1], 1))
FAILED = episode(2, None, branch("main", [0, 1]))
GROUP = group_of(FORKED, WRONG, FAILED)


def test_c22_rows_are_branches_of_members_with_a_reward() -> None:
    rows = GROUP.rows()
    assert [(row.member, row.branch, row.advantage) for row in rows] == [
        (0, "main", 1.0), (0, "critic", 1.0), (1, "main", -1.0)
    ]  # fmt: skip
    assert rows[1].token_ids.tolist() == [10, 11, 10, 11]
    assert rows[1].mask.tolist() == [0, 0, 0, 1]
    assert rows[1].logprobs.tolist() == [0.0, 0.0, 0.0, -0.5]
    assert rows[1].versions.tolist() == [-1, -1, -1, 3]
    assert [row.prompt_length for row in rows] == [1, 3, 3]


def test_padding_is_masked() -> None:
    batch = GROUP.to_batch()
    assert batch.token_ids_RT.shape == (3, 6)
    assert batch.token_ids_RT[0].tolist() == [10, 11, 12, 0, 0, 0]
    assert batch.is_token_RT.sum(1).tolist() == [3, 4, 6]
    assert batch.mask_RT.sum(1).tolist() == [2, 1, 2]
    assert batch.versions_RT[0].tolist() == [-1, 2, 2, -1, -1, -1]
    assert batch.advantages_R.tolist() == [1.0, 1.0, -1.0]
    assert padded(GROUP.rows(), pad_id=7).token_ids_RT[0, 3] == 7


def test_ragged_holds_the_same() -> None:
    wide, flat = GROUP.to_batch("padded"), GROUP.to_batch("ragged")
    assert flat.starts.tolist() == [0, 3, 7, 13]
    for name in ("token_ids", "mask", "logprobs", "versions"):
        values = getattr(wide, f"{name}_RT")
        assert values[wide.is_token_RT].tolist() == getattr(flat, f"{name}_N").tolist()
        assert values.dtype == getattr(flat, f"{name}_N").dtype
    assert flat.mask_N.dtype == np.bool_
    assert not flat.logprobs_N[~flat.mask_N].any()


def test_stale_members_have_no_row_and_still_count() -> None:
    """Row 23 of what users complain of: a stale sample is dropped, not its group."""
    kept = GROUP.older_than(2)
    assert kept.stale == {1, 2}
    assert [row.member for row in kept.rows()] == [0, 0]
    assert [row.advantage for row in kept.rows()] == [1.0, 1.0]
    assert GROUP.older_than(4).rows() == []
    assert GROUP.older_than(1).stale == {2}


def test_no_rows_is_an_empty_batch() -> None:
    group = group_of(FAILED)
    assert group.to_batch().token_ids_RT.shape == (0, 0)
    assert group.to_batch("ragged").starts.tolist() == [0]
    assert not group.has_signal
    assert not group_of(episode(0, 1.0), episode(1, 1.0)).has_signal


def test_a_row_without_an_advantage_is_no_row_of_a_batch() -> None:
    row = GROUP.rows()[0]._replace(advantage=None)
    with pytest.raises(ValueError, match="t, member 0 has no advantage"):
        ragged([row])
