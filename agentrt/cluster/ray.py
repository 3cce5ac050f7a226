"""`joined`: the engines and workers of one run as actors of a Ray cluster. The extra `[ray]`.

An engine's actor has a process of its own for the engine and says where it answers; turns go to it from the workers by
HTTP, never through Ray. There is one worker a node. One that ends is started again, and meanwhile gets nothing. All of
them end with the run. The key of the engines goes through Ray, so the cluster's network has to be trusted, as Ray says.
"""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import anyio
import msgspec
import ray
from ray.exceptions import RayActorError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentrt.cluster.spread import WorkerLost
from agentrt.cluster.worker import Worker
from agentrt.core.errors import EngineFailure, UsageError
from agentrt.core.protocol import EngineInfo
from agentrt.core.records import EpisodeRecord
from agentrt.core.spec import EngineSpec, RunSpec
from agentrt.engine.remote.spawn import spawned
from agentrt.rollout.resume import GroupPlan

RETURN_SECONDS = 0.5
"""Between two looks for a worker, when all are lost."""


class EngineOwner:
    """The actor that owns one engine on its node."""

    def __init__(self, model: str, spec: EngineSpec, key: str) -> None:
        one = msgspec.structs.replace(spec, engines=1)
        self._process = ExitStack()  # ends with this one, which Ray ends without a word
        [self._url] = self._process.enter_context(spawned(model, one, key, host=get_node_ip_address()))

    def url(self) -> str:
        """Where it answers."""
        return self._url


@contextmanager
def joined(address: str, spec: RunSpec, api_key: str = "") -> Iterator["Crew"]:
    """Start what a run needs on the cluster at `address`, unless `spec` names its servers, which answer to `api_key`."""
    try:
        ray.init(address=address, log_to_driver=True, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"--ray {address}: no cluster can be joined: {str(error).splitlines()[0]}") from error
    try:
        urls = list(spec.engine.urls)
        if not urls:
            api_key = secrets.token_urlsafe(32)
            needs = {"num_gpus": 1} if spec.engine.device.startswith("cuda") else {"num_cpus": 1}
            owner = ray.remote(EngineOwner).options(scheduling_strategy="SPREAD", **needs)
            owners = [owner.remote(spec.model, spec.engine, api_key) for _ in range(spec.engine.engines)]
            urls = ray.get([one.url.remote() for one in owners])
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        yield Crew([_worker(node, spec, urls, api_key) for node in nodes], urls)
    finally:
        ray.shutdown()


def _worker(node: str, spec: RunSpec, urls: list[str], api_key: str) -> Any:
    """The worker of a node; after the node's end, of another one."""
    options = ray.remote(Worker).options(
        num_cpus=0, max_restarts=-1, max_concurrency=max(spec.max_concurrent, 2),
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
    )  # fmt: skip
    return options.remote(spec, urls, api_key)


class Crew:
    """The workers: `agentrt.cluster.spread.Workers`. A unit goes to the one that plays the fewest."""

    def __init__(self, actors: list[Any], urls: list[str]) -> None:
        self.actors, self.urls = actors, urls
        self._load = dict.fromkeys(actors, 0)
        """Units that each plays; those that are lost are not in it."""
        self._returning: dict[Any, Any] = {}
        """By what a lost one says when it is there again."""

    def open(self) -> EngineInfo:
        """Wait until engines and workers are there."""
        infos: list[EngineInfo] = ray.get([actor.open.remote() for actor in self.actors])
        return infos[0]

    async def play(self, plan: GroupPlan) -> list[EpisodeRecord]:
        """See `agentrt.cluster.spread.Workers.play`."""
        actor = await self._least_loaded()
        self._load[actor] += 1
        try:
            records: list[EpisodeRecord] = await actor.play.remote(plan)
        except RayActorError as error:
            self._lose(actor)
            raise WorkerLost(str(error).splitlines()[0]) from error
        finally:
            if actor in self._load:
                self._load[actor] -= 1
        return records

    async def _least_loaded(self) -> Any:
        """Waits while all are lost. `EngineFailure` if none comes back."""
        while True:
            self._take_back()
            if self._load:
                return min(self._load, key=lambda actor: self._load[actor])
            if not self._returning:
                raise EngineFailure("no worker is left in the cluster; go on with --resume when there are nodes")
            await anyio.sleep(RETURN_SECONDS)

    def _lose(self, actor: Any) -> None:
        """Give it nothing until it has been started again."""
        if self._load.pop(actor, None) is not None:
            self._returning[actor] = actor.open.options(max_task_retries=-1).remote()

    def _take_back(self) -> None:
        for actor, answer in list(self._returning.items()):
            if ray.wait([answer], timeout=0)[0]:
                del self._returning[actor]
                with suppress(RayActorError):  # gone for good
                    ray.get(answer)
                    self._load[actor] = 0
