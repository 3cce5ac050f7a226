"""The families against the templates of the models: appending is, id by id, rendering the whole; and where it is not."""

import json
from pathlib import Path

import oracles
import pytest
from families import ADD, CASES, Case, Described, conversations, rendered, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.env.chat.message import Message

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_prompt_turns_and_joins_are_the_whole_render_where_no_rule_rewrites(name: str) -> None:
    case = BY_NAME[name]

    @given(st.data())
    @settings(max_examples=40, deadline=None)
    def check(data: st.DataObject) -> None:
        opening, exchanges = data.draw(conversations(case))
        tools = [ADD] if case.tools and data.draw(st.booleans()) else []
        _follow(case, opening, exchanges, tools)

    check()


def _follow(
    case: Case, opening: list[Message], exchanges: list[tuple[Message, list[Message]]], tools: list[Described]
) -> None:
    renderer = case.make(vocabulary())
    ids, said = renderer.prompt(opening, tools), list(opening)
    assert ids == rendered(case, said, tools)
    for turn, answers in exchanges:
        reason = renderer.rewrites([*said, turn], answers, tools)
        ids += renderer.turn(turn) + renderer.join(answers, ended=True)
        said += [turn, *answers]
        if reason:
            assert ids != rendered(case, said, tools), reason
            assert not case.branches_alike or renderer.prompt(said, tools) == rendered(case, said, tools)
            return
        assert ids == rendered(case, said, tools)


def test_the_slice_of_the_vocabulary_in_these_tests_is_the_real_one() -> None:
    slice_path = Path(__file__).with_name("qwen_slice.json")
    part, whole = json.loads(slice_path.read_text(encoding="utf-8")), json.loads(oracles.definition("qwen"))
    assert part["model"]["vocab"].items() <= whole["model"]["vocab"].items()
    ids = {token["content"]: token["id"] for token in whole["added_tokens"]}
    assert {token["content"]: token["id"] for token in part["added_tokens"]}.items() <= ids.items()


def test_c03_spellings_of_the_real_vocabulary() -> None:
    for sampled, encoded in (
        ([2590, 1663], [6489]),
        ([53122, 316], [393, 30002]),
        ([1699, 25310, 367], [59, 811, 446, 367]),
    ):
        assert vocabulary().encode(vocabulary().decode(sampled)) == encoded
