"""Cache groups: the layers of a model that keep KV equally long, and how many pages each group has.

A page holds the KV of `page_size` ids for the layers of one group. Group 0 keeps every id; it decides which prefixes are
cached and what the scheduler counts. Each other group has a window: a layer that attends the last w ids needs the KV of
no others. Most models have group 0 alone.
"""

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from agentrt.core.errors import UsageError
from agentrt.core.spec import EngineSpec

SPARE = 2
"""Windows that a group has room for, by the number of sequences that run at once: others wait between two turns."""


class Group(NamedTuple):
    """One cache group."""

    num_pages: int
    window: int = 0
    """Ids whose KV it keeps, the last ones; 0 means all."""

    def first_kept(self, tokens: int) -> int:
        """The first of `tokens` ids whose KV is kept once all have theirs."""
        return max(0, tokens - self.window) if self.window else 0


def size_groups(windows: Sequence[int], spec: EngineSpec) -> tuple[Group, ...]:
    """`spec.pool_tokens` ids for group 0; for a window, room for a full batch of running sequences and some that wait.

    So a step that has its pages in group 0 can have them in every group: with as many pages as group 0 has, because
    a sequence holds a page of a window only where it holds one of group 0; with fewer, because they suffice for any
    sequences that run together, and those that do not can be revoked.
    """
    most = -(-spec.pool_tokens // spec.page_size)
    return tuple(
        Group(min(most, SPARE * _running_pages(window, spec)), window) if window else Group(most) for window in windows
    )


class Pages(NamedTuple):
    """What a model keeps KV in: for each of its cache groups the window, and the bytes of a page."""

    windows: Sequence[int]
    page_bytes: Sequence[int]


def fitted(spec: EngineSpec, models: Sequence[Pages], free_bytes: int, staged_bytes: int = 0) -> EngineSpec:
    """The spec with a number for `kv_tokens`: that of the spec, or as many ids as fit a device, for all `models` at once.

    A tenth of what is free is left for what a step computes and for the graphs that it is captured in. If nobody gave a
    number, `staged_bytes` are left too, for new weights beside the present ones, but never more than half of the rest: who
    needs them to fit gives a number. `UsageError` if the pages do not fit; it says what would.
    """
    room = int(free_bytes * (1 - STEP_SHARE))
    if spec.kv_tokens == "auto":
        pages = _most_pages(spec, models, room - min(staged_bytes, room // 2))
    elif _pages_bytes(pages := -(-spec.kv_tokens // spec.page_size), spec, models) <= room:
        return spec
    else:
        most = _most_pages(spec, models, room) * spec.page_size
        fits = f"{most} tokens fit" if most else "not even one page fits: take a smaller model, or a larger device"
        raise UsageError(
            f"engine.kv_tokens ({spec.kv_tokens}) takes {_pages_bytes(pages, spec, models) / 2**30:.1f} GiB of the device, "
            f"of which {free_bytes / 2**30:.1f} GiB are free; {fits}"
        )
    if not pages:
        raise UsageError(
            f"engine.kv_tokens: {free_bytes / 2**30:.1f} GiB are free on the device and not even one page fits; "
            "take a smaller model, or a larger device"
        )
    return msgspec.structs.replace(spec, kv_tokens=pages * spec.page_size)


def _most_pages(spec: EngineSpec, models: Sequence[Pages], room: int) -> int:
    """The most pages of group 0 that leave what all groups take within `room` bytes."""
    beyond = room // min(model.page_bytes[0] for model in models) + 1
    return bisect_right(range(1, beyond + 1), room, key=partial(_pages_bytes, spec=spec, models=models))


def _pages_bytes(pages: int, spec: EngineSpec, models: Sequence[Pages]) -> int:
    """What all groups take if group 0 has so many pages."""
    spec = msgspec.structs.replace(spec, kv_tokens=pages * spec.page_size)
    return sum(
        group.num_pages * size
        for windows, page_bytes in models
        for group, size in zip(size_groups(windows, spec), page_bytes, strict=True)
    )


STEP_SHARE = 0.1
"""Of a device's free memory, kept for what a step computes."""
HOST_FACTOR = 4
"""Host tokens for each token of the device, unless the spec says how many."""
HOST_SHARE = 0.25
"""Of the memory that is free, at most, unless the spec says how many."""


def size_host(page_bytes: Sequence[int], spec: EngineSpec) -> list[int]:
    """Pages of each group on the host: as many of a window as of group 0, since many short conversations may be parked."""
    tokens = HOST_FACTOR * spec.pool_tokens if spec.host_tokens == "auto" else spec.host_tokens
    most = -(-tokens // spec.page_size)
    if spec.host_tokens == "auto":
        most = min(most, int(HOST_SHARE * free_memory() / sum(page_bytes)))
    return [most] * len(page_bytes)


def free_memory() -> int:
    """Bytes that this process may still take, as far as the system says; 0 if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    with suppress(OSError, ValueError):  # no control group, or none with a limit
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(free, 0)


def _running_pages(window: int, spec: EngineSpec) -> int:
    """The most pages of a window that the sequences of one step can hold: each its window, what it computes, and branches."""
    branches = (spec.draft_branches - 1) * (-(-spec.draft_length // spec.page_size) + 1)
    return spec.max_batch * (-(-window // spec.page_size) + 2 + branches) + -(-spec.step_tokens // spec.page_size)
