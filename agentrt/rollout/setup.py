"""`Setup`: what all episodes of a run share."""

import os
from collections.abc import Callable
from functools import partial

import anyio
import msgspec

from agentrt.core.protocol import Engine
from agentrt.core.spec import RunSpec, SamplingParams
from agentrt.env.chat.renderer import Renderer
from agentrt.env.environment import Environment, check
from agentrt.env.rubric import Rubric
from agentrt.report.running import RunningEpisode
from agentrt.rollout.calls import ToolRunner
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.sandbox import Sandbox
from agentrt.sandbox.shared import SharedWorkers

CALLS_PER_CORE = 4
"""Tool processes at one time; waiting for a place is not charged to the tool."""


class Setup:
    """Borrowed by every episode of a run; it opens and closes nothing."""

    def __init__(
        self,
        *,
        environment: Environment,
        engine: Engine,
        renderer: Renderer,
        spec: RunSpec,
        sandboxes: Callable[[], ToolRunner] | None = None,
    ) -> None:
        self.environment, self.engine, self.renderer = environment, engine, renderer
        self.seed, self.limits = spec.seed, spec.limits
        self.rubric = Rubric(environment)
        check(environment)
        self.tools = {tool.name: tool for tool in environment.tools}
        self.params = law_of_turns(spec, renderer)
        self.running: set[RunningEpisode] = set()
        """The episodes that run now, for displays."""
        self.scoring = anyio.CapacityLimiter(spec.max_scoring)
        """Permits of graders: a stuck one holds up neither episodes nor tools."""
        permits = Permits(CALLS_PER_CORE * (os.cpu_count() or 1))
        self.sandboxes: Callable[[], ToolRunner] = sandboxes or partial(
            Sandbox, permits, workers=SharedWorkers(), allow_weak=spec.sandbox.allow_weak
        )


def law_of_turns(spec: RunSpec, renderer: Renderer) -> SamplingParams:
    """The law that turns are sampled from: the spec's, and the end ids of the renderer."""
    stop_token_ids = tuple(dict.fromkeys((*spec.sampling.stop_token_ids, *renderer.stop_token_ids)))
    return msgspec.structs.replace(spec.sampling, stop_token_ids=stop_token_ids)
