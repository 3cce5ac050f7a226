"""`Zygote`: the runtime's handle on the process that forks into each call. See `agentrt.sandbox.inside.zygote`."""

import errno
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import anyio
import msgspec

from agentrt.sandbox.inside.job import Job, Setup, written
from agentrt.sandbox.level import Layers

MAX_MESSAGE = 1 << 17
"""Of a job: arguments and environment."""
WARM_SLOTS = min(2 * (os.cpu_count() or 1), 16)
"""Of each zygote: two processes each, which share most of its memory."""
KEPT_SLOTS = 6 * WARM_SLOTS
"""Of each zygote, at most: slots that serve one call after the other. (Not with a port: a network remembers.)"""
RETRY_SECONDS = 0.02
"""Between two tries to hand over a call while as many are on their way as the kernel takes."""
_FULL = (errno.EAGAIN, errno.ETOOMANYREFS)
_START = "import sys; sys.path.append(sys.argv[1]); from inside import zygote; zygote.main(int(sys.argv[2]))"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1",
}  # fmt: skip
"""Of the zygote, whose memory every call can read. One thread each: a fork takes no other threads along."""
FIRST_UID, NUM_UIDS = 60_000, 5_000
"""Root's tools run as one of these users, who own nothing else."""


class Place(msgspec.Struct, frozen=True):
    """Where the folders of this runtime's sandboxes are, and whose they are."""

    scratch: Path
    uid: int
    """Who runs tools: the user's own, or one of FIRST_UID... if the runtime is root's."""

    @property
    def episodes(self) -> Path:
        return self.scratch / "episodes"


class Kind(msgspec.Struct, frozen=True):
    """What two calls must have in common to be forked from one zygote."""

    imports: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    has_port: bool = False
    """Its calls have a network of their own, with a port that the runtime relays."""


class Zygote:
    """Started by the constructor, which does not wait for it. `Launcher` owns it."""

    def __init__(self, place: Place, layers: Layers, kind: Kind) -> None:
        root = place.scratch / "root"
        packages = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib")) if kind.imports else ()
        setup = Setup(
            namespaces=layers.namespaces, landlock=layers.landlock, seccomp=layers.seccomp,
            uid=place.uid, root=str(root),
            episodes=str(place.episodes), readable=[*_interpreter(), *dict.fromkeys(packages), *kind.readable],
            paths=[*dict.fromkeys(packages)], imports=list(kind.imports), warm=WARM_SLOTS,
            kept=0 if kind.has_port else KEPT_SLOTS, has_port=kind.has_port,
        )  # fmt: skip
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, ExitStack() as opened:
            opened.enter_context(self._control)
            inside = os.path.dirname(os.path.abspath(__file__))
            self._process = subprocess.Popen(
                [os.path.realpath(sys.executable), "-I", "-S", "-c", _START, inside, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), env=_ENVIRONMENT, cwd="/", start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self._control.send(written(setup))
            self._control.setblocking(False)
            opened.pop_all()  # `close` is for it
        self._uid = place.uid
        self.takes_calls = True
        """Nobody has found it dead, or dying."""
        self.is_ready = False
        """It has answered once: from now on it does at once."""

    def give(self, fd: int) -> None:
        """Make a pipe or file that of whoever runs tools, who may want to open it again (`/dev/stdout`)."""
        if os.getuid() != self._uid:
            os.fchown(fd, self._uid, self._uid)

    async def start(self, job: Job, fds: Sequence[int]) -> None:
        """Start a call. Raises `OSError` if the zygote has ended or the job is too large."""
        message = written(job)
        if len(message) > MAX_MESSAGE:
            raise OSError(f"arguments and environment are {len(message)} bytes, more than {MAX_MESSAGE}")
        while True:
            try:
                socket.send_fds(self._control, [message], fds)
            except OSError as error:
                if error.errno not in _FULL:
                    self.takes_calls = False
                    raise
                await anyio.sleep(RETRY_SECONDS)  # not `wait_writable`: one task alone may wait for a socket
            else:
                return

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """Take no more calls. Those that run go on, and it ends after the last."""
        self._control.close()

    def kill(self) -> None:
        """End it, with all its calls, and wait for that."""
        self.close()
        self._process.kill()
        self._process.wait()


def _interpreter() -> list[str]:
    """The folder of the interpreter and the standard library, unless every call can read it anyway."""
    return [] if f"{sys.base_prefix}/".startswith("/usr/") else [sys.base_prefix]
