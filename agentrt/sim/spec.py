"""What a simulation is asked to do."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from agentrt.core.spec import KVPolicy, ServiceOrder
from agentrt.sim.traffic import Traffic

SimPolicy = KVPolicy | Literal["unlimited"]
"""`unlimited` is a device that everything fits: what no policy can pass."""


class SimSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One cell: a device, a model, a link, traffic, a policy, and how much is asked of the pool."""

    device: Literal["h200"] = "h200"
    model: Literal["qwen3-0.6b", "qwen3-8b", "qwen3-32b"] = "qwen3-8b"
    pool_tokens: int | None = None
    """Ids that fit the pool; without it, what fits the device beside the model."""
    link_gigabytes: float = 50.0
    """A second, each way."""
    host_share: float = 4.0
    """The host's room, by the device's pool."""
    phi: float = 2.0
    """Oversubscription: live episodes times their mean context, by the ids that fit the pool."""
    policy: SimPolicy = "priced"
    order: ServiceOrder = "arrival"
    """`engine.order`: what groups are to be ready for."""
    ttl_seconds: float = 2.0
    """Of the policy `ttl`."""
    live: int | None = None
    """Episodes alive at one time, in the place of `phi`."""
    episodes: int = 1000
    group_size: int = 8
    seed: int = 0
    page_size: int = 64
    step_tokens: int = 2048
    max_batch: int = 512
    traffic: Traffic = Traffic()

    def __post_init__(self) -> None:
        for name in (
            "pool_tokens", "link_gigabytes", "phi", "live", "episodes", "group_size", "page_size", "step_tokens", "max_batch"
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, not {value}")
        if not 0 <= self.host_share < math.inf:
            raise ValueError(f"host_share must be 0 or more, not {self.host_share}; 0 means no host")
        if not 0 <= self.ttl_seconds < math.inf:
            raise ValueError(f"ttl_seconds must be 0 or more, not {self.ttl_seconds}")
        if self.pool_tokens is not None and self.pool_tokens < self.page_size:
            raise ValueError(f"pool_tokens ({self.pool_tokens}) is less than one page of {self.page_size}")
        if self.step_tokens < self.max_batch:
            raise ValueError(f"step_tokens ({self.step_tokens}) is below max_batch ({self.max_batch})")

    def with_(self, **changes: Any) -> "SimSpec":
        """The same but for these."""
        return msgspec.structs.replace(self, **changes)


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell gave. Seconds are virtual, but for `real_seconds`."""

    policy: str
    phi: float
    live: int
    """Episodes alive at one time."""
    episodes_per_hour: float
    full_ids_per_second: float
    """Sampled until the last episode began: without the end of the run, when fewer and fewer are alive."""
    turn_p50: float
    turn_p95: float
    group_p50: float
    """From a group's first start to its last end."""
    group_p95: float
    episodes: int
    failed: int
    turns: int
    seconds: float
    real_seconds: float
    tokens_sampled: int
    tokens_prefilled: int
    tokens_reprefilled: int
    preemptions: int
    steps: int
    kv: Mapping[str, float]
    """The sums of the episodes' accounts: byte-seconds on the device and the host, while tools ran and at all."""
