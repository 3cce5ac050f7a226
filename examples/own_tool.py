"""An environment with a tool of its own: a program beside it that keeps its state in the episode's folder.

agentrt run examples/own_tool.py        agentrt describe examples/own_tool.py
"""

from collections.abc import AsyncIterator
from pathlib import Path

from agentrt import Environment, Episode, Message, Task, reward, tool


class Dice(Environment):
    """Roll three dice with the tool, then say their sum.

    State: the conversation, and the last roll in the episode's folder. Action: a tool call or the answer.
    End: the first turn without a call. Reward: `right` 1.0 for the number alone; `rolled` 0.1 for having rolled.
    """

    tools = (tool(Path(__file__).parent / "dice" / "dice.py"),)

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        for index in range(64):
            yield Task(f"{split}-{index}", (Message("user", "Roll the dice. What is their sum?"),))

    @reward(weight=1.0)
    async def right(self, episode: Episode) -> float:
        rolls = [call.result for call in episode.calls if call.outcome == "ok" and call.arguments == {"op": "roll"}]
        return float(bool(rolls) and episode.answer.strip() == str(sum(map(int, rolls[-1].split()))))

    @reward(weight=0.1)
    async def rolled(self, episode: Episode) -> float:
        return float(any(call.arguments == {"op": "roll"} for call in episode.calls))
