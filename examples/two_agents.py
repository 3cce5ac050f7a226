"""Several agents in one episode, written as a plain async program, and a reward over the whole group.

A writer answers, a critic with a prompt of its own objects, the writer answers again. Each agent is a branch of the
episode: a row of its own for the trainer.

agentrt run examples/two_agents.py --group-size 4
"""

from collections.abc import AsyncIterator, Sequence
from statistics import median

from agentrt import Agent, Episode, Message, Task, group_reward, reward

TOPICS = ("the sea", "a train at night", "an empty house", "the first snow")
MAX_WORDS = 12


class Writing:
    """A sentence of at most twelve words about a topic, criticised once.

    State: two conversations. Action: a turn of the writer or the critic. End: after the writer's second sentence.
    Rewards: `short` for at most twelve words; `typical` for members of a group whose length is near the middle.
    """

    async def tasks(self, split: str) -> AsyncIterator[Task]:
        for topic in TOPICS:
            yield Task(topic, (Message("user", f"Write one sentence about {topic}."),))

    async def rollout(self, task: Task, agent: Agent) -> None:
        draft = await agent.sample()
        critic = agent.episode.agent("critic", Message("system", "You are a strict critic."))
        critique = await critic.sample(Message("user", f"Name one weakness: {draft.content}"))
        await agent.sample(Message("user", f"A critic says: {critique.content} Write it again."))

    @reward(weight=1.0)
    async def short(self, episode: Episode) -> float:
        return float(0 < len(episode.answer.split()) <= MAX_WORDS)

    @group_reward(weight=0.5)
    async def typical(self, episodes: Sequence[Episode]) -> list[float]:
        lengths = [len(episode.answer.split()) for episode in episodes]
        return [1.0 / (1.0 + abs(length - median(lengths))) for length in lengths]
