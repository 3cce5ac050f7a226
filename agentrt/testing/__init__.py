"""Public helpers for tests of environments, and of agentrt itself. No torch at import."""

from agentrt.testing.engine import Answer, Request, ScriptedEngine
from agentrt.testing.stage import MemorySink, called, said, stage
from agentrt.testing.tokenizer import byte_tokenizer
from agentrt.testing.tools import FakeSandbox, fake_tool

__all__ = [
    "Answer",
    "FakeSandbox",
    "MemorySink",
    "Request",
    "ScriptedEngine",
    "byte_tokenizer",
    "called",
    "fake_tool",
    "said",
    "stage",
]
