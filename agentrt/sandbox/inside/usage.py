"""What a call uses, all its processes together: processor time, memory, disk. Read from /proc and the folder itself.

`proc` is an open /proc, which need not be where others find theirs, and `pids` are numbers that it knows.
"""

import os
import resource
import stat
from collections.abc import Iterable
from contextlib import suppress

from . import linux

_TICK = os.sysconf("SC_CLK_TCK")
_BLOCK = 512
_MAX_PATH = 3800
"""Bytes; the kernel takes 4095, and a name in the folder may have 255."""
_UTIME = 11
"""Its place, and that of stime, cutime and cstime after it, in /proc/PID/stat behind the closing parenthesis."""

_NUM_THREADS = 17


def cpu_seconds(proc: int, pids: Iterable[int]) -> float:
    """Of live processes, of children they have waited for, and of those that this process has waited for."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            fields = read(proc, f"{pid}/stat").rpartition(b")")[2].split()
            ticks += sum(map(int, fields[_UTIME : _UTIME + 4]))
    return reaped.ru_utime + reaped.ru_stime + ticks / _TICK


def tasks(proc: int, uid: int) -> int:
    """Processes and threads that a user has, which RLIMIT_NPROC is compared with outside of a user namespace."""
    total = 0
    for name in listed(proc, "."):
        with suppress(OSError):
            if name.isdigit() and os.stat(name, dir_fd=proc).st_uid == uid:
                total += int(read(proc, f"{name}/stat").rpartition(b")")[2].split()[_NUM_THREADS])
    return total


def memory_bytes(proc: int, pids: Iterable[int], limit: int) -> int:
    """Resident memory that is no file's. Above `limit` it is counted again, pages that processes share only once."""
    pids = list(pids)
    total = sum(_resident(proc, pid) for pid in pids)
    return total if total <= limit else sum(_proportional(proc, pid) or _resident(proc, pid) for pid in pids)


def disk(proc: int, folder: int, bytes_limit: int, inodes_limit: int) -> tuple[int, int]:
    """Bytes and entries beneath an open `folder`; counting ends soon after a limit is passed.

    What a folder is may change while it is looked at: no link is followed, to nowhere. A tree so deep that it cannot be counted
    is over the limit of entries: what is down there is hidden.
    """
    total, entries, folders = 0, 0, ["."]
    while folders and total <= bytes_limit and entries <= inodes_limit:
        path = folders.pop()
        if len(os.fsencode(path)) > _MAX_PATH:
            return total, inodes_limit + 1
        for name, status in _entries(proc, folder, path):
            total, entries = total + status.st_blocks * _BLOCK, entries + 1
            if stat.S_ISDIR(status.st_mode):
                folders.append(f"{path}/{name}")
    return total, entries


def _entries(proc: int, folder: int, path: str) -> list[tuple[str, os.stat_result]]:
    """What is in a folder, also in one that its owner has closed to hide it."""
    found: list[tuple[str, os.stat_result]] = []
    with suppress(OSError):  # it has gone
        place = linux.open_beneath(folder, path, os.O_PATH | os.O_DIRECTORY)
        try:
            listed = _open_listed(proc, place)
            try:
                for name in os.listdir(listed):
                    with suppress(OSError):
                        found.append((name, os.stat(name, dir_fd=listed, follow_symlinks=False)))
            finally:
                os.close(listed)
        finally:
            os.close(place)
    return found


def _open_listed(proc: int, place: int) -> int:
    """The folder at the descriptor `place`, to be listed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(".", flags, dir_fd=place)
    except PermissionError:
        os.chmod(f"self/fd/{place}", 0o700, dir_fd=proc)
        return os.open(".", flags, dir_fd=place)


def listed(folder: int, path: str) -> list[str]:
    """The names in a folder beneath an open one."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def read(folder: int, path: str) -> bytes:
    """What is in a file beneath an open folder."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb", buffering=0) as file:
        return file.read()


def _resident(proc: int, pid: int) -> int:
    return _kilobytes(proc, f"{pid}/status", b"RssAnon:", b"RssShmem:")


def _proportional(proc: int, pid: int) -> int:
    return _kilobytes(proc, f"{pid}/smaps_rollup", b"Pss_Anon:", b"Pss_Shmem:")


def _kilobytes(proc: int, path: str, *names: bytes) -> int:
    """The sum of these lines, in bytes; 0 if the process has ended or cannot be looked at."""
    with suppress(OSError):
        return sum(int(line.split()[1]) << 10 for line in read(proc, path).splitlines() if line.startswith(names))
    return 0
