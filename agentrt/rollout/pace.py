"""The pace of asynchronous rollouts: when a further group may start, so that it is not too old when it is trained on.

Pure counting. A trainer takes `batch` groups, updates the policy, takes the next `batch`. A group that starts now will be
taken after all that are under way, and every full batch before it brings a new version. It may start if that makes it at
most `max_staleness` versions old. With 0 the rollouts of a version wait for the update to it; with 1 the next batch is
sampled while the trainer works.
"""


class Pace:
    """`extra` groups may be under way beyond what the trainer takes: over-sampling, for stragglers to be left behind."""

    def __init__(self, batch: int, max_staleness: int, extra: int = 0) -> None:
        for name, value, least in (("batch", batch, 1), ("max_staleness", max_staleness, 0), ("extra", extra, 0)):
            if value < least:
                raise ValueError(f"{name} must be {least} or more, not {value}")
        self.batch, self.max_staleness, self.extra = batch, max_staleness, extra
        self.under_way = 0
        """Groups that have started and were neither taken nor dropped."""
        self.taken = 0
        """Of the present batch."""

    def __repr__(self) -> str:
        return f"<Pace {self.under_way} under way, {self.taken} of {self.batch} taken>"

    @property
    def may_start(self) -> bool:
        ahead = self.taken + max(0, self.under_way - self.extra)
        return ahead // self.batch <= self.max_staleness

    def start(self) -> None:
        """A group starts."""
        self.under_way += 1

    def take(self) -> None:
        """The trainer takes a group."""
        self.under_way -= 1
        self.taken += 1

    def drop(self) -> None:
        """A group was filtered out, is stale or has failed: another one may start in its place."""
        self.under_way -= 1

    def begin_batch(self) -> None:
        """There is a new version, or the trainer asks for a group: if the batch is full, the next one begins."""
        if self.taken >= self.batch:
            self.taken = 0
