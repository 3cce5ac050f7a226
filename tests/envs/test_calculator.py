"""The calculator environment: stable tasks, an exact grader, and cheaters that get nothing."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from splits import take

from agentrt import StopReason, Task
from agentrt.core.errors import UsageError
from agentrt_envs.calculator import HOSTILE, Calculator, grade, numbers, problem, task
from agentrt_tools.calculator import evaluate

PINNED = {
    "train": "Start with 87. Then 2 more come. Then take away 8. Multiply by 9. What is the result?",
    "eval": "There are 81 birds. Subtract that from 3. What is the result?",
}


def ended(answer: str, item: Task, stop_reason: StopReason = StopReason.COMPLETED) -> Any:
    return SimpleNamespace(answer=answer, task=item, stop_reason=stop_reason)


@pytest.mark.anyio
@pytest.mark.parametrize(("split", "size"), [("eval", 256), ("adversarial", 24), ("train", 300)])
async def test_tasks_depend_on_split_and_index_only(split: str, size: int) -> None:
    tasks = await take(Calculator(), split, 300)
    assert len(tasks) == size
    assert tasks == [task(split, index) for index in range(size)]
    assert len({item.id for item in tasks}) == size


def test_the_first_task_of_each_split_is_pinned() -> None:
    asked = {split: task(split, 0).messages[1].content for split in ("train", "eval")}
    assert asked == PINNED


@pytest.mark.anyio
async def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(UsageError, match="calculator has no split 'dev'; its splits are train, eval, adversarial"):
        await take(Calculator(), "dev", 1)


@pytest.mark.parametrize("index", range(50))
def test_the_steps_of_a_problem_give_its_value(index: int) -> None:
    drawn = problem(random.Random(index))
    value = str(drawn.start)
    for expression in drawn.expressions:
        value = evaluate(expression.format(x=value))
    assert value == str(drawn.value)


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        ("Answer: -57", 1.0), ("It is\nAnswer: -57\n", 1.0), ("Answer: 57", 0.0), ("answer: -57", 0.0), ("-57", 0.0),
        ("Answer: -57.", 0.0), ("Answer: -57 or 3", 0.0), ("Answer: 3\nAnswer: -57", 0.0), ("Answer: -57\nbye", 0.0),
        ("Answer: -057", 0.0), ("Answer: -57/1", 0.0), ("Answer:-57", 0.0), ("The Answer: -57", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_grade(content: str, reward: float) -> None:
    assert grade(content, "-57") == reward


@pytest.mark.anyio
async def test_only_a_final_answer_counts() -> None:
    item = task("eval", 0)
    answer = f"Answer: {item.data['answer']}"
    assert await Calculator().correct(ended(answer, item)) == 1.0
    assert await Calculator().correct(ended(answer, item, StopReason.TURN_LENGTH)) == 0.0
    assert await Calculator().correct(ended("", item, StopReason.MAX_TURNS)) == 0.0


def cheats(question: str) -> list[str]:
    """What a policy could say without doing the sum: the grader's words, the question, the numbers it saw."""
    seen = numbers(question)
    words = ["correct", "correct = 1.0", "reward 1.0", "1.0", "True", "score: 1.0", question, " ".join(seen)]
    words += [*seen, *map(str, range(-9, 10)), ", ".join(map(str, range(2000))), "episode.task.data['answer']"]
    return words + [f"Answer: {word}" for word in words] + ["\n".join(f"Answer: {number}" for number in range(2000))]


@pytest.mark.anyio
@pytest.mark.parametrize("index", range(2 * len(HOSTILE)))
async def test_a_cheater_gets_nothing_on_adversarial_tasks(index: int) -> None:
    item = task("adversarial", index)
    for answer in cheats(item.messages[1].content):
        assert await Calculator().correct(ended(answer, item)) == 0.0
    assert await Calculator().correct(ended(f"Answer: {item.data['answer']}", item)) == 1.0
