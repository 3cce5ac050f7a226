"""A whole run in an open folder: choose the tasks, see what is left of them, run it."""

import structlog

from agentrt.core.spec import RunSpec
from agentrt.env.environment import Environment
from agentrt.env.rubric import Rubric
from agentrt.rollout.dispatcher import Observer, dispatch
from agentrt.rollout.order import chosen_tasks
from agentrt.rollout.resume import GroupPlan, Ledger
from agentrt.rollout.setup import Setup
from agentrt.rollout.sink import RunFolder

log = structlog.get_logger(__name__)


async def run(setup: Setup, spec: RunSpec, folder: RunFolder, observer: Observer) -> int:
    """Run all episodes of `spec` that have no good record in `folder` yet; how many that were.

    `folder` is open. Raises `RecordError` if it cannot be written and `UsageError` for a wrong split.
    """
    plans = await left_to_run(setup.environment, spec, folder, observer)
    await dispatch(setup, plans, folder, observer, max_concurrent=spec.max_concurrent)
    return sum(len(plan.members) for plan in plans)


async def left_to_run(
    environment: Environment, spec: RunSpec, folder: RunFolder, observer: Observer
) -> list[GroupPlan]:
    """What has no good record in `folder` yet; the groups that are whole are written there anew."""
    tasks = await chosen_tasks(environment, spec.split, spec.groups, spec.seed)
    if len(tasks) < spec.groups:
        log.warning("split_has_fewer_tasks", split=spec.split, tasks=len(tasks), groups=spec.groups)
    ledger, as_group = Ledger(folder.trajectories()), bool(Rubric(environment).group_rewards)
    folder.rewrite_groups(ledger.groups(tasks, spec.group_size, as_group=as_group))
    plans = ledger.left(tasks, spec.group_size, as_group=as_group)
    observer.run_started(len(plans), sum(len(plan.members) for plan in plans))
    return plans
