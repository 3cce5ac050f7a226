"""`Worker`: a process that plays episodes of a run over servers, and hands their records back. It writes nothing."""

import asyncio
from collections.abc import Sequence

from agentrt.core.models import find_model
from agentrt.core.protocol import EngineInfo
from agentrt.core.records import EpisodeRecord
from agentrt.core.spec import RunSpec
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.remote.engine import RemoteEngine
from agentrt.env import registry
from agentrt.env.chat.choose import renderer_for
from agentrt.rollout.dispatcher import QUIET, dispatch
from agentrt.rollout.resume import GroupPlan
from agentrt.rollout.setup import Setup
from agentrt.rollout.sink import Held
from agentrt.sandbox.probe import shared


class Worker:
    """Lives as long as its process, and so does its engine's connections. Model and environment are found here by name."""

    def __init__(self, spec: RunSpec, urls: Sequence[str], api_key: str) -> None:
        environment = registry.load(spec.environment, **spec.environment_args)
        if environment.programs:
            environment.require(shared().isolation, allow_weak=spec.sandbox.allow_weak)
        folder = find_model(spec.model)
        tokenizer = Tokenizer.load(folder)
        self._engine = RemoteEngine(urls, tokenizer, api_key=api_key)
        self._setup = Setup(
            environment=environment, engine=self._engine, renderer=renderer_for(folder, tokenizer), spec=spec
        )
        self._holder: asyncio.Task[None] | None = None

    async def open(self) -> EngineInfo:
        """Wait for the servers and probe them, once. Before anything is played, also after a restart."""
        if self._holder is None:
            self._opened: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold())
        return await asyncio.shield(self._opened)

    async def _hold(self) -> None:
        """Be inside the engine: a call is a task that ends, and what the engine does beside calls must not end with one."""
        try:
            async with self._engine:
                self._opened.set_result(self._engine.info)
                await asyncio.Event().wait()
        except Exception as error:  # whatever kept it from opening is for those who wait for that
            if self._opened.done():
                raise  # a bug of later
            self._opened.set_exception(error)

    async def play(self, plan: GroupPlan) -> list[EpisodeRecord]:
        """Run the members of a plan; their records, in member order."""
        await self.open()
        held = Held()
        await dispatch(self._setup, [plan], held, QUIET, max_concurrent=len(plan.members))
        return sorted(held.episodes, key=lambda record: record.member)
