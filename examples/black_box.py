"""A program of somebody's own as the agent: black_box/agent.py, written against the `openai` package.

    agentrt run examples/black_box.py

It runs in the sandbox and reaches this episode's endpoint and nothing else. Needs agentrt[serve] and openai.
"""

from pathlib import Path

from agentrt.serve.program import ProgramEnvironment, program
from agentrt_envs.calculator import Calculator


class BlackBox(ProgramEnvironment, Calculator):
    """The calculator's problems, solved by a program with a calculator of its own.

    State: the program's. Action: what it asks the model. End: the program's. Reward: the last line is the right answer.
    """

    tools = ()
    program = program(Path(__file__).parent / "black_box" / "agent.py", imports=("openai",))
