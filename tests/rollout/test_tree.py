"""A group's rows as a tree: each row is a path in it, what rows share is there once, and a model sees every row as if alone."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from agentrt.core.tokens import Floats, Ids, Mask
from agentrt.rollout.batch import Row
from agentrt.rollout.tree import tree_of

PROMPT = [5, 6]


def row(member: int, ids: list[int], advantage: float = 1.0) -> Row:
    """The prompt, then sampled ids, every third one observed."""
    mask = [0] * len(PROMPT) + [int(index % 3 != 2) for index in range(len(ids))]
    return Row(
        "t", member, "main", Ids(PROMPT + ids), Mask(mask), Floats([-0.25 * (member + 1) * bit for bit in mask]),
        Ids([member if bit else -1 for bit in mask]), advantage,
    )  # fmt: skip


def test_shared_ids_are_one_node_and_keep_what_was_recorded_of_each_row() -> None:
    tree = tree_of([row(0, [1, 2]), row(1, [1, 3], -1.0)])
    assert tree.token_ids_N.tolist() == [5, 6, 1, 2, 3]
    assert tree.positions_N.tolist() == [0, 1, 2, 3, 3]
    assert tree.attends_NN.astype(int).tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]
    ]  # fmt: skip
    assert tree.before_S.tolist() == [1, 2, 1, 2]
    assert tree.sampled_S.tolist() == [1, 2, 1, 3]
    assert tree.logprobs_S.tolist() == [-0.25, -0.25, -0.5, -0.5]
    assert tree.versions_S.tolist() == [0, 0, 1, 1]
    assert tree.advantages_S.tolist() == [1.0, 1.0, -1.0, -1.0]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=6))
def test_every_row_is_a_path_and_every_prefix_one_node(tails: list[list[int]]) -> None:
    rows = [row(member, ids) for member, ids in enumerate(tails)]
    tree = tree_of(rows)
    prefixes = {tuple(one.token_ids[: end + 1]) for one in rows for end in range(len(one.token_ids))}
    paths = [tuple(tree.token_ids_N[attended_N].tolist()) for attended_N in tree.attends_NN]
    assert len(paths) == len(prefixes)
    assert set(paths) == prefixes
    assert [len(path) - 1 for path in paths] == tree.positions_N.tolist()
    sampled = [tuple(one.token_ids[: place + 1]) for one in rows for place in range(len(one.mask)) if one.mask[place]]
    assert [(*paths[node], token) for node, token in zip(tree.before_S, tree.sampled_S, strict=True)] == sampled


def test_a_model_gives_each_row_the_logits_that_it_has_alone() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    rows = [row(0, [1, 2, 3, 4, 1]), row(1, [1, 2, 4]), row(2, [7, 7, 7, 7])]
    tree = tree_of(rows)
    with torch.inference_mode():
        logits_NV = model(
            torch.from_numpy(tree.token_ids_N)[None], attention_mask=torch.from_numpy(tree.attends_NN)[None, None],
            position_ids=torch.from_numpy(tree.positions_N)[None],
        ).logits[0]  # fmt: skip
        alone = [model(torch.tensor([one.token_ids.tolist()])).logits[0] for one in rows]
    expected = [alone[index][place - 1] for index, one in enumerate(rows) for place in np.flatnonzero(one.mask)]
    torch.testing.assert_close(logits_NV[tree.before_S], torch.stack(expected), rtol=1e-5, atol=1e-6)
