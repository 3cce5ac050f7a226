"""All processes of one tool call, however they came to be, and their end.

A killed process group misses children that started a session of their own. So this process adopts orphans
(`PR_SET_CHILD_SUBREAPER`): whatever a call leaves behind becomes a child of ours, is known by its session or by the
call's own TMPDIR in its environment, and is killed and reaped. Only own children are killed, whose pids cannot be
reused before we reap them; what others in this process have started is left alone. One gap: an orphan that changed its
session *and* died before it was looked at is not known any more and stays a zombie until this process ends.
"""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_SESSION_FIELD = 3
"""In /proc/PID/stat, counted after the command's closing parenthesis."""


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process. Idempotent; raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class Leftovers:
    """What the call of process `leader`, with TMPDIR `temporary`, leaves behind; `leader` itself is not touched."""

    def __init__(self, leader: int, temporary: Path) -> None:
        self._leader = leader
        self._cookie = b"\0TMPDIR=" + os.fsencode(temporary) + b"\0"
        self._dying: set[int] = set()

    def kill(self) -> bool:
        """Kill what is there and reap what is dead; False if there was nothing.

        The children of a dead process are adopted meanwhile, so this is called until it finds nothing.
        """
        found = [pid for pid in _children() if pid in self._dying or self._holds(pid)]
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            self._dying.add(pid)
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) != (0, 0):
                    self._dying.discard(pid)
        return bool(found)

    def _holds(self, pid: int) -> bool:
        if pid == self._leader:
            return False
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[_SESSION_FIELD]) == self._leader:
                return True
            return self._cookie in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False


def _children() -> list[int]:
    """The children of this process, those of all its threads."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended
            found += map(int, Path(f"/proc/self/task/{thread}/children").read_bytes().split())
    return found
