"""Levels of isolation, and the report of what is in force on this machine."""

import platform
from enum import IntEnum

import msgspec


class Level(IntEnum):
    """How far a tool is kept from everything else. What each one stops is in docs/tools.md."""

    L1 = 1
    """Limits only: files of the user are readable. Refused unless the tool or the user allows it."""
    L2 = 2
    """Landlock and seccomp: files, network, system calls. For containers."""
    L3 = 3
    """Namespaces too: a root, processes, users and a network of its own."""


class Layers(msgspec.Struct, frozen=True):
    """What a zygote is told to put around its calls."""

    namespaces: bool
    landlock: int
    """The ABI; 0 for none."""
    seccomp: bool


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """What is in force, as a canary has found it."""

    level: Level
    layers: dict[str, str]
    """files, network, processes, syscalls, identity: `enforced`, or what got through."""
    limits: dict[str, str]
    """wall, cpu, memory, processes, disk: whom the limit is for, and how it is held."""
    reasons: tuple[str, ...] = ()
    """Why no higher level is in force."""
    fixes: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """Short, for every result."""
        return f"{self.level.name}:mem={'poll' if 'polled' in self.limits['memory'] else 'each'}"

    @property
    def line(self) -> str:
        """One line, for the log."""
        layers = ", ".join(f"{name} {state}" for name, state in self.layers.items())
        return f"{self.code} on {platform.system()} {platform.release()}: {layers}"
