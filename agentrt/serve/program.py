"""`ProgramEnvironment`: the agent of an episode is a program that speaks OpenAI's API, whatever it is written with.

    program ── OPENAI_BASE_URL, OPENAI_API_KEY ──► endpoint of this episode ──► engine
       │                                               │ exact ids, branches
       └── ends ──► rewards ◄── record ◄───────────────┘

It runs in the episode's sandbox, and that endpoint is all of the network there is. It is given the task as one JSON line on
standard input. Nothing in it has to know of agentrt: what it says to the model and what the model samples is recorded with
exact ids, as turns of the episode, and the episode's limits end it.
"""

import math
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrt.core.errors import SandboxFailure
from agentrt.env.chat.message import Turn
from agentrt.env.chat.renderer import Family
from agentrt.env.environment import Agent, Environment
from agentrt.env.task import Task
from agentrt.env.tool import Tool
from agentrt.rollout.calls import INFRA, OK
from agentrt.rollout.episode import Episode
from agentrt.sandbox.level import Isolation
from agentrt.sandbox.relay import Address
from agentrt.sandbox.result import ToolResult
from agentrt.sandbox.sandbox import require_address
from agentrt.sandbox.terms import Terms, ToolLimits
from agentrt.serve.app import BODY_BYTES, Reward, Served, application
from agentrt.serve.conversation import Conversation
from agentrt.serve.endpoint import Endpoint
from agentrt.serve.exchange import read_body
from agentrt.serve.metered import Metered
from agentrt.serve.recording import Recordings
from agentrt.serve.requests import read
from agentrt.serve.server import listening, serving

SESSION = "agent"
"""Of the program, at its endpoint."""
HERE = "127.0.0.1"
LIMITS = ToolLimits(cpu_seconds=600)
"""Of a program that is given none. How long it may take is `limits.wall_seconds` of the run."""
TAIL = 500
"""Characters of a failed program's standard error that its record shows."""


def program(
    path: Path, *arguments: str, imports: Sequence[str] = (), readable: Sequence[Path] = (), limits: ToolLimits = LIMITS
) -> Tool:
    """The program at `path`, a Python file or anything that can be executed.

    A Python file sees installed packages only if `imports` names one of them. `readable` is what else it may read.
    """
    argv = (str(path), *arguments)
    if path.suffix == ".py":
        argv = (os.path.realpath(sys.executable), "-I", "-S", *argv)
    terms = Terms(limits=limits, imports=tuple(imports), readable=(str(path), *map(str, readable)))
    return Tool(name=path.stem, description="", parameters={}, argv=argv, terms=terms)


class ProgramEnvironment(Environment):
    """Subclasses give `program`, `tasks` and rewards; a reward sees the last branch that was sampled as the main agent.

    The program has `OPENAI_BASE_URL` and `OPENAI_API_KEY`, which is its own and opens nothing else. What it writes to
    standard output is `episode.state["output"]`. One that fails, or says nothing to the model, has no reward. Needs asyncio.
    """

    program: ClassVar[Tool]
    """What runs: `argv` and `terms`. Terms that name `imports`, such as `openai`, have them ready before it starts."""
    gives_reward: ClassVar[bool] = False
    """Whether the program may post `{"reward": 1.0}` to AGENTRT_REWARD_URL, with its key; the last one counts. Not for
    programs that run what the model writes: it could give itself one."""

    @property
    def programs(self) -> Sequence[Tool]:
        """See `Environment.programs`."""
        return (*self.tools, self.program)

    def require(self, isolation: Isolation, *, allow_weak: bool) -> None:
        """See `Environment.require`: the program needs a network of its own, which only L3 has."""
        super().require(isolation, allow_weak=allow_weak)
        require_address(self.program.terms, isolation)

    async def rollout(self, task: Task, agent: Agent) -> None:
        """Run the program until it ends, or until a limit leaves no room for what it asks."""
        episode = agent.episode
        assert isinstance(episode, Episode), "programs run in episodes of this runtime"
        metered = Metered(episode)
        async with _door(metered, gives_reward=self.gives_reward) as door:
            result = await self._run(task, metered, door)
        if metered.ended is not None:
            episode.stop(metered.ended)
        if result.outcome == INFRA:
            raise SandboxFailure(result.text)
        if result.outcome != OK:
            raise RuntimeError(f"the program ended by {result.outcome}: {(result.stderr or result.text)[-TAIL:]}")
        if metered.last is None:
            raise RuntimeError("the program ended without a word to the model")
        episode.state["output"] = result.text

    async def _run(self, task: Task, metered: Metered, door: "_Door") -> ToolResult:
        """What became of the program. It is ended when a limit has ended the episode."""
        episode, program = metered.episode, self.program
        terms = msgspec.structs.replace(program.terms, environment={**program.terms.environment, **door.variables})
        messages = [{"role": message.role, "content": message.content} for message in task.messages]
        request = {"task_id": task.id, "messages": messages}
        seconds = episode.setup.limits.wall_seconds or math.inf
        result = ToolResult(outcome="timeout", text="a limit of the episode ended it")
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_at, metered.end, group.cancel_scope)
            # not queued: it mostly waits for the model, and as many run as episodes do
            result = await episode.runner.call(
                program.argv, request, seconds=seconds, terms=terms, queued=False, outside=door.address
            )
            group.cancel_scope.cancel()
        return result


async def _cancel_at(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


class _Door(NamedTuple):
    """The way to the model."""

    address: Address
    variables: Mapping[str, str]
    """That tell of it."""


@asynccontextmanager
async def _door(metered: Metered, *, gives_reward: bool) -> AsyncIterator[_Door]:
    """The endpoint of one episode, while its program runs.

    However the block ends, what was said there is the episode's then.
    """
    episode, key = metered.episode, secrets.token_urlsafe(32)
    renderer, info = episode.setup.renderer, metered.info
    assert isinstance(renderer, Family), "an endpoint shows text while it is sampled, which a model's family does"
    with (
        Recordings(metered, renderer, lambda record: None, seed=episode.seed, max_sessions=1) as recordings,
        listening(HERE, 0) as sock,
    ):
        endpoint = Endpoint(metered, renderer, model=info.model, room=info.context_length)
        served = Served(endpoint, recordings, {key: SESSION})
        address = Address(HERE, sock.getsockname()[1])
        url = f"http://{HERE}:{address.port}"
        variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
        routes = served.openai_routes()
        if gives_reward:
            variables["AGENTRT_REWARD_URL"] = f"{url}/reward"
            routes.append(Route("/reward", partial(_reward, served, episode), methods=["POST"]))
        try:
            async with serving(application(routes), sock):
                yield _Door(address, variables)
        finally:
            if len(recordings):
                _adopt(metered, recordings.get(SESSION).conversation)


async def _reward(served: Served, episode: Episode, request: Request) -> Response:
    served.session_of(request)
    episode.finish(read(await read_body(request, BODY_BYTES), Reward).reward)
    return Response()


def _adopt(metered: Metered, conversation: Conversation) -> None:
    """Give the episode what was said. Its main agent is the branch that was sampled last."""
    last = metered.last
    if last is None:
        return
    branch = next(one for one in conversation.branches.values() if one.session is last)
    said = next((message for message in reversed(branch.messages) if message.role == "assistant"), None)
    turn = None
    if said is not None:
        turn = Turn(
            content=said.content, reasoning=said.reasoning, calls=said.calls, cut_by=last.cut_by,
            finish_reason="length" if last.cut_by else "stop",
        )  # fmt: skip
    metered.episode.adopt(conversation.records(), branch.messages, turn)
