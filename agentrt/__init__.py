"""The runtime for agent rollouts in reinforcement learning: what an environment's author imports. Imports no torch."""

from agentrt.core.records import StopReason
from agentrt.core.spec import Limits, RunSpec, SamplingParams
from agentrt.env.chat.message import Message, Turn
from agentrt.env.environment import Agent, Environment, Episode
from agentrt.env.rubric import Rubric, group_reward, metric, reward
from agentrt.env.task import Task
from agentrt.env.tool import Tool, tool

__all__ = [
    "Agent",
    "Environment",
    "Episode",
    "Limits",
    "Message",
    "Rubric",
    "RunSpec",
    "SamplingParams",
    "StopReason",
    "Task",
    "Tool",
    "Turn",
    "group_reward",
    "metric",
    "reward",
    "tool",
]
