"""The lookup environment: stable tasks, answers that the documents give step by step, and cheaters that get nothing."""

import random
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from splits import take

from agentrt import StopReason, Task
from agentrt.core.errors import UsageError
from agentrt.core.records import EpisodeRecord
from agentrt.rollout.play import run_episode
from agentrt.testing import FakeSandbox, ScriptedEngine, called, said, stage
from agentrt_envs.lookup import DOCUMENTS, HOSTILE, PEOPLE, Lookup, hostile_riddle, make_task, riddle, task
from agentrt_tools.search import best

PINNED = "Where does Balli's friend's friend live?"


def search(item: Task, query: str) -> str:
    return "\n".join(best(query, item.files[DOCUMENTS].splitlines(), 1))


@pytest.mark.anyio
@pytest.mark.parametrize(("split", "size"), [("eval", 256), ("adversarial", 24), ("train", 300)])
async def test_tasks_depend_on_split_and_index_only(split: str, size: int) -> None:
    tasks = await take(Lookup(), split, 300)
    assert len(tasks) == size
    assert tasks == [task(split, index) for index in range(size)]
    assert len({item.id for item in tasks}) == size


def test_the_first_task_is_pinned() -> None:
    assert task("eval", 0).messages[1].content == PINNED


@pytest.mark.anyio
async def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(UsageError, match="lookup has no split 'dev'; its splits are train, eval, adversarial"):
        await take(Lookup(), "dev", 1)


@pytest.mark.parametrize("index", range(60))
@pytest.mark.parametrize("draw", [riddle, lambda rng: hostile_riddle(rng.randrange(99), rng)], ids=["plain", "hostile"])
def test_each_search_names_the_next_and_only_the_last_entry_has_the_answer(index: int, draw: Any) -> None:
    drawn = draw(random.Random(index))
    item = make_task("t", drawn)
    assert len(drawn.documents) == PEOPLE
    assert len(drawn.path) in (2, 3)
    assert drawn.path[0] in drawn.question
    assert drawn.town not in drawn.question
    entries = [search(item, name) for name in drawn.path]
    assert [entry.partition(":")[0] for entry in entries] == list(drawn.path)
    assert all(following in entry for entry, following in zip(entries, drawn.path[1:], strict=False))
    assert [drawn.town in entry for entry in entries] == [False] * (len(entries) - 1) + [True]


class Staged(FakeSandbox):
    """Finds the shipped search program by the last word of its command line."""

    async def call(self, argv: Any, *rest: Any, **named: Any) -> Any:
        return await super().call(argv[-1:], *rest, **named)


async def played(item: Task, *turns: str) -> EpisodeRecord:
    async def find(arguments: Any) -> str:
        return search(item, arguments["query"])

    sandbox = Staged({Lookup.tools[0].argv[-1]: find})
    record = await run_episode(stage(Lookup(), ScriptedEngine([said(turn) for turn in turns]), sandbox=sandbox), item)
    assert sandbox.files == item.files
    return record


@pytest.mark.anyio
@pytest.mark.parametrize("split", ["eval", "adversarial"])
async def test_an_expert_is_right_in_three_turns_or_more(split: str) -> None:
    for index in range(24):
        item, rng = task(split, index), random.Random(f"{split}:{index}")
        drawn = hostile_riddle(index, rng) if split == "adversarial" else riddle(rng)
        searches = [called("search", f'{{"query": "{name}"}}') for name in drawn.path]
        record = await played(item, *searches, f"Answer: {drawn.town}")
        assert (record.reward, record.metrics["turns"]) == (1.0, len(drawn.path) + 1.0)
        assert len(record.branches[0].turns) >= 3


@pytest.mark.anyio
@pytest.mark.parametrize("index", range(2 * len(HOSTILE)))
async def test_a_cheater_gets_nothing_on_adversarial_tasks(index: int) -> None:
    """It searches once, and then says whatever it saw: names, towns, the lures, all of them, the grader's words."""
    item = task("adversarial", index)
    question = item.messages[1].content
    start = re.findall(r"[A-Z][a-z]+(?='s )", question)[0]
    seen = question + search(item, start)
    words = [*dict.fromkeys(re.findall(r"[A-Za-z]+", seen)), "correct", "correct = 1.0", "1.0", question]
    every = re.findall(r"town (\w+)", item.files[DOCUMENTS])
    said_all = [", ".join(every), "\n".join(f"Answer: {town}" for town in every), " ".join(every)]
    for word in (*words, *said_all):
        for text in (word, f"Answer: {word}"):
            ended = SimpleNamespace(answer=text, task=item, stop_reason=StopReason.COMPLETED)
            assert await Lookup().correct(cast(Any, ended)) == 0.0


@pytest.mark.anyio
async def test_only_a_final_answer_counts() -> None:
    item = task("eval", 0)
    for reason in (StopReason.MAX_TURNS, StopReason.TURN_LENGTH):
        ended = SimpleNamespace(answer=f"Answer: {item.data['answer']}", task=item, stop_reason=reason)
        assert await Lookup().correct(cast(Any, ended)) == 0.0
