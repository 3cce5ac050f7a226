"""`Tokens`: parallel arrays that another thread may be appending to."""

from agentrt.core.tokens import Tokens


def test_a_copy_made_in_the_middle_of_a_commit_is_without_that_id() -> None:
    tokens = Tokens()
    tokens.observe([1, 2])
    tokens.commit(3, -0.5, 0)
    tokens.token_ids.append(4)
    tokens.mask.append(1)
    copy = tokens.copy(1)
    assert copy.token_ids.tolist() == [2, 3]
    assert copy.mask.tolist() == [0, 1]
    assert copy.logprobs.tolist() == [0.0, -0.5]
    assert copy.versions.tolist() == [-1, 0]
