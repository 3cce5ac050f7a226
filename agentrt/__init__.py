"""The runtime for agent rollouts in reinforcement learning: what an environment's author imports. Imports no torch."""

from agentrt.core.records import StopReason
from agentrt.core.spec import Limits, RunSpec, SamplingParams
from agentrt.env.chat.message import Message
from agentrt.env.environment import Environment
from agentrt.env.rubric import Rubric, group_reward, metric, reward
from agentrt.env.task import Task
from agentrt.env.tool import Tool, tool

__all__ = [
    "Environment",
    "Limits",
    "Message",
    "Rubric",
    "RunSpec",
    "SamplingParams",
    "StopReason",
    "Task",
    "Tool",
    "group_reward",
    "metric",
    "reward",
    "tool",
]
