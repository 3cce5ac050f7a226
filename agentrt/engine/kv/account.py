"""What a lease's KV costs: bytes held, by time, on the device and on the host."""

from typing import TYPE_CHECKING

from agentrt.core.protocol import KVUsage
from agentrt.engine.kv.pages import NONE
from agentrt.engine.kv.radix import HOST

if TYPE_CHECKING:
    from agentrt.engine.kv.lease import Lease
    from agentrt.engine.kv.tiers import HostTier


class Meter:
    """Integrates the bytes that one lease holds. Whoever changes them calls `charge` first."""

    __slots__ = (
        "_device", "_host", "_paused_at", "_since", "_tool_device", "_tool_host", "device_bytes", "host_bytes", "reprefilled",
        "restored", "wait",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        self.device_bytes = self.host_bytes = 0.0
        """Held now; what several leases hold is divided among them."""
        self.reprefilled = 0
        """Ids computed again whose KV was there once."""
        self.restored = 0
        """Ids whose KV came back from the host."""
        self.wait = 0.0
        """Seconds that turns waited for copies from the host."""
        self._since = now
        self._device = self._host = self._tool_device = self._tool_host = 0.0
        self._paused_at: tuple[float, float] | None = None

    def charge(self, now: float) -> None:
        """Count what was held until now."""
        seconds, self._since = now - self._since, now
        self._device += seconds * self.device_bytes
        self._host += seconds * self.host_bytes

    def pause(self, now: float) -> None:
        """A tool starts."""
        self.charge(now)
        self._paused_at = self._device, self._host

    def resume(self, now: float) -> None:
        """It has ended."""
        if self._paused_at is not None:
            self.charge(now)
            self._tool_device += self._device - self._paused_at[0]
            self._tool_host += self._host - self._paused_at[1]
            self._paused_at = None

    def take(self, now: float) -> KVUsage:
        """What was counted since the last time."""
        self.charge(now)
        usage = KVUsage(
            device_byte_seconds=self._device, host_byte_seconds=self._host, tool_device_byte_seconds=self._tool_device,
            tool_host_byte_seconds=self._tool_host, reprefilled_tokens=self.reprefilled,
            restored_tokens=self.restored, wait_seconds=self.wait,
        )  # fmt: skip
        self._device = self._host = self._tool_device = self._tool_host = self.wait = 0.0
        self.reprefilled = self.restored = 0
        return usage


def count_held(lease: "Lease", tier: "HostTier", page_size: int, now: float) -> None:
    """Have a lease's meter count what it holds from now on. What open leases share is divided among them."""
    meter, page_bytes = lease.meter, tier.page_bytes
    path = lease.anchor.path() if lease.anchor else []
    own = unshared = max(len(lease.pages) - (lease.anchor.end if lease.anchor else 0), 0)
    shares = 0.0
    for node in path:
        length, users = node.end - node.start, node.users
        unshared += length if users == 1 else 0
        shares += length / users
    lease.unshared = unshared * page_size
    meter.charge(now)
    meter.device_bytes = meter.host_bytes = 0.0
    if lease.pages:
        meter.device_bytes = (own + shares) * page_bytes[0]
        for size, row in zip(page_bytes[1:], lease.table[1:], strict=True):
            meter.device_bytes += (len(row) - row.count(NONE)) * size
    for group, (size, pool) in enumerate(zip(page_bytes, tier.pools, strict=True)):
        if pool.num_free < pool.num_pages:
            shares = 0.0
            for node in path:
                copies = node.tables[HOST][group]
                shares += (len(copies) - copies.count(NONE)) / node.users
            meter.host_bytes += shares * size
