"""Drafts from text, against a search of everything that was said."""

from array import array
from collections import Counter

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentrt.core.tokens import IntArray
from agentrt.engine.speculate.suffix import CANDIDATES, KINDS, LONGEST, NOTHING, ORDERS, Found, Memory


def ids(*values: int) -> "array[int]":
    return array("i", values)


def find(memory: Memory, tail: IntArray, limit: int) -> Found:
    (found,) = memory.find([tail], [limit])
    assert memory.branches > 1 or not found.branches
    return found


def test_a_quoted_tool_result() -> None:
    memory = Memory()
    memory.add(ids(9, 9, 10, 11, 12, 13, 14, 9, 9), 0)
    assert find(memory, ids(1, 2, 10, 11, 12), 8) == ([13, 14, 9, 9], 3, 1, [])
    assert find(memory, ids(1, 2, 10, 11, 12), 2).ids == [13, 14]
    assert find(memory, ids(11, 12), 8) == ([], 0, 0, [])  # two ids are no match


def test_the_longest_match_wins_and_equals_vote() -> None:
    memory = Memory()
    memory.add(ids(1, 2, 3, 4, 50), 0)
    memory.add(ids(7, 2, 3, 4, 60), 0)
    assert find(memory, ids(1, 2, 3, 4), 3).ids == [50]
    assert find(memory, ids(0, 2, 3, 4), 3) == ([60], 3, 0, [])  # one each: the newer
    memory.add(ids(8, 2, 3, 4, 50, 51), 0)
    assert find(memory, ids(0, 2, 3, 4), 3) == ([50, 51], 3, 0, [])
    memory.add(ids(5, 6, 7, 70), 0)
    memory.add(ids(4, 6, 7, 70, 71), 0)
    memory.add(ids(5, 6, 7, 70, 72), 0)
    assert find(memory, ids(5, 6, 7), 3) == ([70, 72], 3, 2, [])  # both say 70, and one goes on


def test_what_others_went_on_with_is_a_branch() -> None:
    """From each place on where texts disagree, what the next most have; also where none has half of them."""
    memory = Memory(branches=3)
    for text in (
        (0, 1, 2, 3, 10, 11, 12),
        (0, 1, 2, 3, 10, 11, 13),
        (0, 1, 2, 3, 10, 11, 12, 14),
        (0, 1, 2, 3, 20, 21),
    ):
        memory.add(ids(*text), 0)
    assert find(memory, ids(0, 1, 2, 3), 8) == ([10, 11, 12, 14], 4, 0, [(0, [20, 21]), (2, [13])])
    assert find(memory, ids(0, 1, 2, 3), 2) == ([10, 11], 4, 0, [(0, [20, 21])])
    assert find(memory, ids(0, 1, 2, 3), 1) == ([10], 4, 0, [(0, [20])])
    for last in (30, 31, 32):
        memory.add(ids(5, 6, 7, 8, 9, last, 33), 0)
    assert find(memory, ids(5, 6, 7), 8) == ([8, 9], 3, 3, [(2, [32, 33])])


def test_what_does_not_stand_often_enough_is_not_proposed() -> None:
    memory = Memory()
    memory.add(ids(1, 2, 3, 4, 50, 51, 52), 0)
    memory.add(ids(9, 5, 6, 7, 70, 71, 72), 0)
    memory.add(ids(8, 5, 6, 7, 70, 71, 72), 0)
    tails = [ids(2, 3, 4), ids(5, 6, 7)]
    one, few = found = memory.find(tails, [8, 8])
    assert [one.kind for one in found] == ["text, one match, 2 and more", "text, few agreed, 2 and more"]
    assert (one.ids, few.ids) == ([50, 51, 52], [70, 71, 72])
    survivals_KJ = np.ones((len(KINDS), 3))
    survivals_KJ[KINDS.index(one.kind)], survivals_KJ[KINDS.index(few.kind)] = [0.2, 0.1, 0.1], [0.9, 0.5, 0.2]
    for least, expected in ((0.1, [3, 3]), (0.2, [1, 3]), (0.5, [0, 2]), (0.6, [0, 1]), (1.0, [0, 0])):
        found = memory.find(tails, [8, 8], survivals_KJ, least)
        assert [len(one.ids) for one in found] == expected
    assert found == [NOTHING, NOTHING]


def test_kinds_are_named_by_votes_and_octaves() -> None:
    names = [Found([], matched, agreed).kind for matched, agreed in ((3, 0), (4, 1), (15, 3), (LONGEST, 4), (31, 16))]
    assert names == [
        "text, split, 2 and more", "text, one match, 4 and more", "text, few agreed, 8 and more",
        "text, many agreed, 32 and more", "text, many agreed, 16 and more",
    ]  # fmt: skip


def test_a_turn_follows_the_prompt_before_it() -> None:
    memory = Memory()
    conversation = ids(*range(20))
    memory.add(conversation[:12], 0, once=True)
    memory.add(conversation, 12)
    assert find(memory, ids(9, 10, 11), 4).ids == [12, 13, 14, 15]
    assert find(memory, ids(3, 4, 5), 4).ids == [6, 7, 8, 9]


def test_a_siblings_turn_is_found_before_a_strangers_by_the_prompt_they_share() -> None:
    """All prompts end alike, and longer so than a match must be; the stranger's turn is the newer one."""
    memory, end = Memory(), range(100, 100 + 2 * max(ORDERS))
    own, other = ids(1, 2, 3, *end), ids(4, 5, 6, *end)
    for prompt, said in ((own, (20, 21, 22)), (other, (30, 31, 32))):
        memory.add(prompt, 0, once=True)
        memory.add(prompt + ids(*said), len(prompt))
    found = find(memory, own, 4)
    assert (found.ids, found.matched, found.agreed) == ([20, 21, 22], len(own), 1)
    assert find(memory, other, 4).ids == [30, 31, 32]


def test_a_draft_ends_where_texts_that_agreed_no_longer_do() -> None:
    memory = Memory()
    for last in (70, 70, 71):
        memory.add(ids(9, 5, 6, 7, 8, last, 33), 0)
    found = find(memory, ids(5, 6), 8), find(memory, ids(9, 5, 6), 8)
    assert [(one.ids, one.agreed) for one in found] == [([], 0), ([7, 8], 3)]


def test_a_prompt_that_a_group_shares_is_kept_once() -> None:
    memory = Memory(256)
    for _ in range(8):
        memory.add(ids(*range(10)), 0, once=True)
    assert find(memory, ids(2, 3, 4), 2).ids == [5, 6]
    assert memory._end == 11
    for _ in range(40):
        memory.add(ids(*range(100, 110)), 0)
    memory.add(ids(*range(10)), 0, once=True)
    assert find(memory, ids(2, 3, 4), 2).ids == [5, 6]  # it had been forgotten, so it was kept again


def test_what_was_forgotten_is_not_proposed() -> None:
    memory = Memory(128)
    memory.add(ids(1, 2, 3, 4, 5, 6), 0)
    for start in range(40):
        memory.add(ids(*range(1000 * start + 10, 1000 * start + 25)), 0)
        found = find(memory, ids(1, 2, 3), 8).ids
        assert found == [4, 5, 6] or not found
    assert not find(memory, ids(1, 2, 3), 8).ids


@given(st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_against_a_plain_search(texts: list[list[int]], data: st.DataObject) -> None:
    """Of few texts, with no place left out: the id that follows the longest match most often."""
    memory = Memory(1024)
    for text in texts:
        memory.add(ids(*text), 0)
    tail = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    found = find(memory, ids(*tail), 1)
    lengths: dict[tuple[int, int], int] = {}
    for which, text in enumerate(texts):
        for last in range(len(text) - 1):
            length = 0
            while length < min(last + 1, len(tail), LONGEST) and text[last - length] == tail[-1 - length]:
                length += 1
            if length >= min(ORDERS):
                lengths[which, last] = length
    assume(len(lengths) <= CANDIDATES)
    longest = max(lengths.values(), default=0)
    assert found.matched == longest
    votes = Counter(texts[which][last + 1] for (which, last), length in lengths.items() if length == longest)
    if votes and 2 * max(votes.values()) >= votes.total():
        assert votes[found.ids[0]] == max(votes.values())
        assert found.agreed == (votes.total() if len(votes) == 1 else 0)
