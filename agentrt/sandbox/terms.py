"""`Terms`: on which a tool runs: its protocol, its limits, what it may read, how well it must be isolated."""

import math
from typing import Literal

import msgspec

from agentrt.sandbox.capture import MIN_BYTES
from agentrt.sandbox.level import Level

MAX_FILES = 1024
Protocol = Literal["oneshot", "worker", "shared", "mcp"]


class ToolLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one call; of a worker's whole life where a call does not end its process."""

    wall_seconds: float | None = None
    """None: the episode's `limits.tool_seconds`, which is the upper bound in any case."""
    queue_seconds: float = 600.0
    """Until other calls leave a place for it. Not charged to `wall_seconds`, and the sandbox's failure, not the tool's."""
    start_seconds: float = 60.0
    """Until the process is there, imports included. Not charged to `wall_seconds`."""
    cpu_seconds: float = 60.0
    """Of all processes together."""
    memory_mb: int = 1024
    """Of all processes together, without files."""
    address_space_mb: int | None = 4096
    """Of each process; None for programs that reserve far more than they use (Java)."""
    processes: int = 64
    files: int = 256
    """Open ones, in each process."""
    file_mb: int = 128
    """Of each file."""
    disk_mb: int = 256
    """Of the episode's folder."""
    inodes: int = 4096
    """Files and folders, in the episode's folder."""
    tmp_mb: int = 64
    """Of /tmp, which is memory. Only with namespaces: else /tmp is part of the folder."""
    output_bytes: int = 65_536
    """Of standard output, of standard error, and of the text of a reply."""
    reply_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"limits.{name} must be a number above 0, not {value}")
        if self.output_bytes < MIN_BYTES:
            raise ValueError(f"limits.output_bytes is at least {MIN_BYTES}, not {self.output_bytes}")
        if self.files > MAX_FILES:
            raise ValueError(f"limits.files is at most {MAX_FILES}, not {self.files}")


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a tool's manifest says beyond its name and arguments."""

    protocol: Protocol = "oneshot"
    limits: ToolLimits = ToolLimits()
    method: str = ""
    """Of an MCP server: its name for this tool. The request is then `{"name": ..., "arguments": ...}`."""
    imports: tuple[str, ...] = ()
    """Modules that are there already when a call starts. Naming any makes installed packages importable."""
    readable: tuple[str, ...] = ()
    """Files and folders beyond the system's and the interpreter's."""
    environment: dict[str, str] = {}
    """Variables beyond those that every tool has."""
    max_concurrency: int | None = None
    """Calls at one time, over all episodes of a run. None: as many as there is room for; of a shared tool, one."""
    min_isolation: Level = Level.L2

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, not {self.max_concurrency}")

    @property
    def places(self) -> int | None:
        """How many calls of it may run at one time, and so how many processes of a shared tool there are; None: no bound."""
        return 1 if self.protocol == "shared" and self.max_concurrency is None else self.max_concurrency


DEFAULT_TERMS = Terms()
