"""The families against the templates of the models: appending is, id by id, rendering the whole; and where it is not."""

import pytest
from families import ADD, CASES, Case, conversations, rendered, vocabulary
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


def _follow(case: Case, opening, exchanges, tools) -> None:  # type: ignore[no-untyped-def]
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
