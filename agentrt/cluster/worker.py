"""`Worker`: a process that plays episodes of a run over servers, and hands their records back. It writes nothing."""

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

    async def open(self) -> EngineInfo:
        """Wait for the servers and probe them. Before anything is played, also after a restart."""
        if not self._engine.lines:
            await self._engine.__aenter__()
        return self._engine.info

    async def play(self, plan: GroupPlan) -> list[EpisodeRecord]:
        """Run the members of a plan; their records, in member order."""
        await self.open()
        held = Held()
        await dispatch(self._setup, [plan], held, QUIET, max_concurrent=len(plan.members))
        return sorted(held.episodes, key=lambda record: record.member)
