"""Shopping: how much does it all cost? A first environment; change it to yours, or delete what you do not need.

agentrt describe my_env.py      agentrt run my_env.py      agentrt eval my_env.py
"""

import random
from collections.abc import AsyncIterator

from agentrt import Environment, Episode, Message, Task, metric, reward, tool

INSTRUCTION = "Use the calculator for each operation. Then write Answer: and the number."


class Shopping(Environment):
    """What some things cost together.

    State: the conversation. Action: a tool call, or the answer. End: the first turn without a call.
    Reward: `correct` is 1.0 if the last line is `Answer: N` with the right N.
    """

    # Programs that the policy may call. Each call runs in a sandbox of its own; a program of
    # yours, with its manifest mine.toml beside it, is `tool(Path(__file__).parent / "mine.py")` (docs/tools.md).
    tools = (tool("calculator"),)
    # `agentrt run` takes tasks of "train", `agentrt eval` of "eval".
    splits = ("train", "eval")

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        """The tasks of a split, always the same. Use any source: a file, a data set, a generator."""
        for index in range(1000 if split == "train" else 100):
            rng = random.Random(f"{split}:{index}")
            count, price = rng.randint(2, 12), rng.randint(2, 99)
            question = f"Start with {price}. Multiply by {count}. What is the result?"
            yield Task(
                id=f"{split}-{index}",  # unique in its split
                messages=(Message("system", INSTRUCTION), Message("user", question)),
                data={"answer": str(count * price)},  # for the rewards; the policy never sees it
            )

    # What happens between two turns. This is the default: run the calls; a turn without calls is the end.
    #
    # async def step(self, episode, turn):
    #     return await episode.main.call(*turn.calls) if turn.calls else None

    @reward(weight=1.0)
    async def correct(self, episode: Episode) -> float:
        """Compare strictly: a policy in training finds every way to please a lenient grader."""
        return float(episode.answer.rpartition("\n")[2] == f"Answer: {episode.task.data['answer']}")

    @metric
    async def calls(self, episode: Episode) -> float:
        """Recorded, not rewarded."""
        return float(len(episode.calls))
