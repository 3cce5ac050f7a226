"""A whole run in an open folder: choose the tasks, see what is left of them, run it."""

from agentrt.core.spec import RunSpec
from agentrt.rollout.dispatcher import Observer, dispatch
from agentrt.rollout.order import chosen_tasks
from agentrt.rollout.resume import Ledger
from agentrt.rollout.setup import Setup
from agentrt.rollout.sink import RunFolder


async def run(setup: Setup, spec: RunSpec, folder: RunFolder, observer: Observer) -> int:
    """Run all episodes of `spec` that have no good record in `folder` yet; how many that were.

    `folder` is open. Raises `RecordError` if it cannot be written and `UsageError` for a wrong split.
    """
    tasks = await chosen_tasks(setup.environment, spec.split, spec.groups, spec.seed)
    ledger, as_group = Ledger(folder.trajectories()), bool(setup.rubric.group_rewards)
    folder.rewrite_groups(ledger.groups(tasks, spec.group_size, as_group=as_group))
    plans = ledger.left(tasks, spec.group_size, as_group=as_group)
    await dispatch(setup, plans, folder, observer, max_concurrent=spec.max_concurrent)
    return sum(len(plan.members) for plan in plans)
