"""What a simulated run plays: traffic drawn from laws, or a recorded run."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from agentrt.engine.simulate import Script
from agentrt.env.chat.renderer import Renderer
from agentrt.env.environment import Environment
from agentrt.rollout.order import chosen_tasks
from agentrt.rollout.resume import GroupPlan, Ledger
from agentrt.sim import traffic
from agentrt.sim.spec import SimSpec


class Played(NamedTuple):
    """For one run: an environment counts the members that it plays."""

    environment: Environment
    renderer: Renderer
    plans: Sequence[GroupPlan]


class Load(Protocol):
    """Episodes to play, the same ones for every policy."""

    def mean_context(self) -> float:
        """Ids of the context at the end of a turn, over all turns."""

    def limits(self) -> tuple[int, int, float]:
        """The most ids of a context and of a turn, and the longest that a tool may take, in seconds."""

    def script(self, spec: SimSpec) -> Script:
        """How long the turns are."""

    async def play(self, spec: SimSpec, note: Callable[[float], None]) -> Played:
        """Ready to be played once. `note` is told how long each turn took from its request on."""


class TrafficLoad(NamedTuple):
    """`sim.load.Load` of a traffic."""

    traffic: traffic.Traffic

    def mean_context(self) -> float:
        """See `Traffic.mean_context`."""
        return self.traffic.mean_context()

    def limits(self) -> tuple[int, int, float]:
        """Of a turn, an eighth of the context."""
        longest = self.traffic.context_tokens // traffic.LEAST_CONTEXT
        return self.traffic.context_tokens, longest, self.traffic.longest_seconds

    def script(self, spec: SimSpec) -> Script:
        """The turn lengths."""
        return traffic.Policy(self.traffic)

    async def play(self, spec: SimSpec, note: Callable[[float], None]) -> Played:
        """`spec.episodes` of them, in whole groups."""
        environment = traffic.TrafficEnvironment(self.traffic, spec.seed, note)
        tasks = await chosen_tasks(environment, "train", -(-spec.episodes // spec.group_size), spec.seed)
        return Played(environment, traffic.Renderer(), Ledger().left(tasks, spec.group_size, as_group=False))
