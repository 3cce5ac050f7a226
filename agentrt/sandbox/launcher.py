"""`Launcher`: what all sandboxes of this process share: the folder they are in, the zygotes, the level in force.

There is one in a process (`probe.shared`). It ends with it: the folder is removed at exit, and after a crash by the next
runtime that starts; zygotes see the end by themselves.
"""

import atexit
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrt.sandbox.channel import make_job
from agentrt.sandbox.inside import landlock, seccomp
from agentrt.sandbox.inside.job import FOLDER, Job
from agentrt.sandbox.level import Isolation, Layers, Level
from agentrt.sandbox.remove import remove
from agentrt.sandbox.terms import Terms
from agentrt.sandbox.zygote import FIRST_UID, NUM_UIDS, Kind, Place, Zygote

RECYCLE_AFTER = 10_000
"""Calls of one zygote; then another one takes over."""
_PREFIX, _LOCK, _NEW_LOCK = "agentrt-", "lock", "lock.new"


class Launcher:
    """Borrowed by sandboxes. Zygotes are started when a call needs them; `close` ends them."""

    def __init__(self, place: Place, layers: Layers, isolation: Isolation) -> None:
        self.place, self.layers, self.isolation = place, layers, isolation
        self._zygotes: dict[Kind, tuple[Zygote, int]] = {}
        self._leaving: list[Zygote] = []
        """Those that take no more calls."""

    def zygote(self, kind: Kind) -> Zygote:
        """The one to start the next call of this kind."""
        self._leaving = [zygote for zygote in self._leaving if not zygote.has_ended]
        zygote, calls = self._zygotes.get(kind, (None, 0))
        if zygote is not None and (calls >= RECYCLE_AFTER or zygote.has_ended or not zygote.takes_calls):
            zygote.close()
            self._leaving.append(zygote)
            zygote = None
        if zygote is None:
            zygote, calls = Zygote(self.place, self.layers, kind), 0
        self._zygotes[kind] = zygote, calls + 1
        return zygote

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A new folder for an episode, removed at the end, whatever is in it then."""
        folder = Path(tempfile.mkdtemp(dir=self.place.episodes))
        if os.getuid() != self.place.uid:
            os.chown(folder, self.place.uid, self.place.uid)
        try:
            yield folder
        finally:
            remove(folder)

    def job(self, argv: Sequence[str], folder: Path, terms: Terms, port: int = 0) -> Job:
        """One call in an episode's folder. This interpreter is known inside by its real name only."""
        argv = [
            os.path.realpath(arg) if place == 0 and arg == sys.executable else arg for place, arg in enumerate(argv)
        ]
        if self.layers.namespaces:
            return make_job(argv, folder.name, FOLDER, "/tmp", terms, port)
        return make_job(argv, folder.name, str(folder), str(folder), terms, port)

    def close(self) -> None:
        """End all zygotes, and calls that still run."""
        for zygote in (*self._leaving, *(zygote for zygote, _ in self._zygotes.values())):
            zygote.kill()
        self._leaving, self._zygotes = [], {}


def layers_of(level: Level) -> Layers:
    """What this kernel has for a level."""
    abi = landlock.abi() if level > Level.L1 else 0
    return Layers(namespaces=level is Level.L3, landlock=abi, seccomp=seccomp.is_known())


def make_place() -> Place:
    """A new folder for the sandboxes of this process, locked while it lives and removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder / _NEW_LOCK, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # held until the process ends
    os.rename(folder / _NEW_LOCK, folder / _LOCK)  # only now, so that nobody finds it free
    place = Place(folder, os.getuid() or _unprivileged())
    for path in (folder, place.episodes):
        path.mkdir(exist_ok=True)
        path.chmod(0o711)  # whoever runs a tool passes through, and lists nothing
    (folder / "root").mkdir()
    owner = os.getpid()
    atexit.register(lambda: remove(folder) if os.getpid() == owner else None)
    return place


def _unprivileged() -> int:
    """A user that root can become, with nothing of its own; 0 if there is none (a namespace with one user)."""
    uid = FIRST_UID + os.getpid() % NUM_UIDS
    ranges = [[*map(int, line.split())] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return uid if any(first <= uid < first + count for first, _, count in ranges) else 0


def sweep() -> None:
    """Remove folders of runtimes of this user that have crashed."""
    for folder in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder)
            finally:
                os.close(lock)
