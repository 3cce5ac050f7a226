"""`Update`: new weights on their way into an engine; and how those of a draft model come with the policy's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from agentrt.core.errors import WeightsError
from agentrt.core.protocol import UpdateMode, WeightSource
from agentrt.engine.weights import Install

DRAFT = "draft."
"""What the names of a draft model's weights begin with, in an update that has both."""


@dataclass(eq=False, slots=True, kw_only=True)
class Update:
    """New weights that wait for the end of a step, or for that of every request in flight."""

    version: int
    mode: UpdateMode
    install: Install
    pause_seconds: float = 0.0
    requests: int = 0
    tokens_dropped: int = 0
    is_done: bool = False
    failure: Exception | None = None
    """What `install` raised; the version did not change then."""


def stage_together(
    source: WeightSource, policy: Callable[[WeightSource], Install], draft: Callable[[Mapping[str, Tensor]], Install] | None
) -> Install:  # fmt: skip
    """Stage the tensors of a policy, and those named `draft.*` for its draft model, to be used from the same moment on.

    Only tensors by name can hold both. Raises `WeightsError` if there is no such model.
    """
    if not isinstance(source, Mapping):
        return policy(source)
    own = {name.removeprefix(DRAFT): tensor for name, tensor in source.items() if name.startswith(DRAFT)}
    install = policy({name: tensor for name, tensor in source.items() if not name.startswith(DRAFT)})
    if not own:
        return install
    if draft is None:
        raise WeightsError(f"the new weights hold {DRAFT}{min(own)}, and this engine has no draft model")
    refresh = draft(own)

    def both() -> None:
        install()
        refresh()

    return both
