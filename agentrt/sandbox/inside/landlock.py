"""Landlock: a process gives up, for itself and all its children, the files and ports that it does not name.

Files by an allow-list of trees; TCP altogether (ABI 4); abstract sockets and signals to outsiders (ABI 6). Not covered
by Landlock: UDP, memory, processes; seccomp and limits are for those.
"""

import ctypes
import os
import struct
from collections.abc import Iterable
from contextlib import suppress

from . import linux

FILES_ABI, SCOPES_ABI = 3, 6
"""The first ABI that can forbid truncation, and the first one with scopes."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH, _RULE_NET_PORT = 1, 2
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_OF_ABI_1, _REFER, _TRUNCATE, _IOCTL_DEV = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15
_CONNECT, _NET = 2, 3
"""Connect; bind and connect: TCP."""
NET_ABI = 4
"""The first one with ports."""
_SCOPES = 3
"""Abstract Unix sockets, signals."""
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ = _EXECUTE | _READ_FILE | _READ_DIR


def abi() -> int:
    """The version that the kernel speaks; 0 if it has none or it is switched off."""
    with suppress(OSError):
        return linux.syscall("landlock_create_ruleset", _CREATE_RULESET, 0, 0, _CREATE_RULESET_VERSION)
    return 0


def ruleset(version: int, readable: Iterable[str], writable: Iterable[str]) -> int:
    """A descriptor of rules: reading and executing beneath `readable`, everything but devices' ioctls beneath `writable`.

    A path that does not exist is left out. Raises `OSError`.
    """
    rules = _create(version)
    for path in readable:
        _allow(rules, path, _READ)
    for path in writable:
        allow_writing(version, rules, path)
    return rules


def allow_writing(version: int, rules: int, path: str) -> None:
    """Add one more writable path."""
    _allow(rules, path, _handled(version) & ~_IOCTL_DEV)


def allow_connecting(rules: int, port: int) -> None:
    """Allow TCP connections to one port. The rules must be of `NET_ABI` or later."""
    attr = ctypes.create_string_buffer(struct.pack("=QQ", _CONNECT, port), 16)
    linux.syscall("landlock_add_rule", _ADD_RULE, rules, _RULE_NET_PORT, attr, 0)


def restrict(rules: int) -> None:
    """Allow what `rules` say and nothing else, for good, in the process and all its children. Needs no_new_privs."""
    linux.syscall("landlock_restrict_self", _RESTRICT_SELF, rules, 0)


def _handled(version: int) -> int:
    handled = _ALL_OF_ABI_1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        if version >= since:
            handled |= right
    return handled


def _create(version: int) -> int:
    handled = _handled(version)
    net, scopes = _NET if version >= NET_ABI else 0, _SCOPES if version >= SCOPES_ABI else 0
    size = 24 if version >= SCOPES_ABI else 16 if version >= NET_ABI else 8
    attr = ctypes.create_string_buffer(struct.pack("=QQQ", handled, net, scopes)[:size], size)
    return linux.syscall("landlock_create_ruleset", _CREATE_RULESET, attr, size, 0)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        is_folder = os.path.isdir(path)
        attr = ctypes.create_string_buffer(struct.pack("=Qi", rights if is_folder else rights & _OF_FILES, fd), 12)
        linux.syscall("landlock_add_rule", _ADD_RULE, rules, _RULE_PATH_BENEATH, attr, 0)
    finally:
        os.close(fd)
