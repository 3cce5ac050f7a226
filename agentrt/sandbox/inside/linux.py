"""The system calls that the standard library lacks. Each raises `OSError` that names the call."""

import ctypes
import fcntl
import os
import platform
import socket
import struct
from contextlib import suppress
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC_WITH_GIL: Final = ctypes.PyDLL(None, use_errno=True)
"""Its calls keep the interpreter's lock, which a call that returns in two processes must."""

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000
CLONE_NEW_ANY = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
CAP_DAC_READ_SEARCH = 2

_SIGCHLD = 17
_AT_FDCWD, _AT_RECURSIVE, _AT_EMPTY_PATH = -100, 0x8000, 0x1000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_CLEAR_ALL = 2, 4
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_CAPABILITY_VERSION_3 = 0x2008_0522
_CLONE_NUMBER = {"x86_64": 56, "aarch64": 220}
_PIVOT_ROOT_NUMBER = {"x86_64": 155, "aarch64": 41}
_OPEN_TREE_NUMBER, _MOVE_MOUNT_NUMBER, _MOUNT_SETATTR_NUMBER, _OPENAT2_NUMBER = 428, 429, 442, 437
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_RESOLVE_PLAINLY = 0x01 | 0x02 | 0x04 | 0x08
"""NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH."""


def syscall(name: str, number: int, *args: int | bytes | ctypes.Array[ctypes.c_char]) -> int:
    """System call `number`; `name` is for the error."""
    return _checked(name, _LIBC.syscall(ctypes.c_long(number), *map(_argument, args)))


def fork(flags: int = 0) -> int:
    """Fork, into new namespaces if `flags` (CLONE_NEW*) say so: 0 in the child, as `os.fork`.

    The caller has one thread, so no lock can be held by another and nothing has to be mended: what `os.fork` does for
    that, and hooks of `os.register_at_fork`, are left out, and with them half of its time.
    """
    number = _CLONE_NUMBER[platform.machine()]
    zeros = [ctypes.c_long(0)] * 4
    return _checked("clone", _LIBC_WITH_GIL.syscall(ctypes.c_long(number), ctypes.c_long(flags | _SIGCHLD), *zeros))


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _checked("unshare", _LIBC.unshare(ctypes.c_int(flags)))


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    arguments = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None)
    _checked(f"mount {kind or source} at {target}", _LIBC.mount(*arguments))


def bind(fd: int, target: str) -> None:
    """Put what an open descriptor (O_PATH) is of, with all that is mounted below it, at `target`. Needs no /proc."""
    tree = syscall("open_tree", _OPEN_TREE_NUMBER, fd, b"", _AT_EMPTY_PATH | _AT_RECURSIVE | _OPEN_TREE_CLONE)
    try:
        syscall("move_mount", _MOVE_MOUNT_NUMBER, tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)


def unmount(target: str) -> None:
    """umount2(2), detached: what is in use stays until it is not."""
    _checked(f"umount {target}", _LIBC.umount2(target.encode(), MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root; the old root is at `old`."""
    syscall("pivot_root", _PIVOT_ROOT_NUMBER[platform.machine()], new.encode(), old.encode())


def restrict_mounts(target: str, attributes: int) -> None:
    """Set `attributes` (MOUNT_ATTR_*) on the mount at `target` and on all below it."""
    attr = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, 0), 32)
    syscall("mount_setattr", _MOUNT_SETATTR_NUMBER, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attr, 32)


def set_dumpable(is_dumpable: bool) -> None:
    """Whether others of the same user may look into this process (ptrace, /proc/PID/mem, environ)."""
    _prctl(_PR_SET_DUMPABLE, int(is_dumpable))


def die_with_parent(signal: int) -> None:
    """Get `signal` when the thread that started this process ends."""
    _prctl(_PR_SET_PDEATHSIG, signal)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    """For good: no setuid program gives this process or its children more than they have."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def become(uid: int, keep: int = 0) -> None:
    """From root to an unprivileged user and group with no other groups and no capabilities but the bits of `keep`."""
    _prctl(_PR_SET_KEEPCAPS, int(bool(keep)))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    set_capabilities(keep)
    set_dumpable(True)  # a change of user cleared it, and then /proc/self/uid_map is root's


def set_capabilities(bits: int) -> None:
    """Exactly these, effective, permitted, inheritable and ambient. The bounding set stays: no_new_privs makes it moot."""
    low, high = bits & 0xFFFF_FFFF, bits >> 32
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), 8)
    data = ctypes.create_string_buffer(struct.pack("=6I", low, low, low, high, high, high), 24)
    _checked("capset", _LIBC.capset(header, data))
    _LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(bits.bit_length()):
        if bits >> capability & 1:
            _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability)


def sethostname(name: str) -> None:
    """Of the UTS namespace."""
    _checked("sethostname", _LIBC.sethostname(name.encode(), ctypes.c_size_t(len(name))))


def open_beneath(folder: int, path: str, flags: int) -> int:
    """openat2(2): `path` from `folder` on, through no link of any kind, nor out of it, nor into another mount."""
    how = ctypes.create_string_buffer(struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE_PLAINLY), 24)
    return syscall("openat2", _OPENAT2_NUMBER, folder, path.encode(errors="surrogateescape"), how, 24)


def number_processes_from(pid: int) -> None:
    """In the namespace of the caller, whose first process it is; not where the kernel was built without that."""
    with suppress(OSError), open("/proc/sys/kernel/ns_last_pid", "wb", buffering=0) as file:
        file.write(str(pid - 1).encode())


def loopback_up() -> None:
    """Switch on the only interface of a new network namespace, so that 127.0.0.1 can be reached."""
    request = struct.pack("16sh22x", b"lo", _IFF_UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def prctl_pointer(option: int, second: int, pointer: ctypes.Structure) -> None:
    """prctl(2) with a structure as its third argument."""
    _checked("prctl", _LIBC.prctl(option, ctypes.c_ulong(second), ctypes.byref(pointer), 0, 0))


def why(error: OSError | ImportError) -> str:
    """An error in words, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _prctl(option: int, second: int, third: int = 0) -> None:
    _checked("prctl", _LIBC.prctl(option, ctypes.c_ulong(second), ctypes.c_ulong(third), 0, 0))


def _argument(value: int | bytes | ctypes.Array[ctypes.c_char]) -> object:
    return ctypes.c_long(value) if isinstance(value, int) else value


def _checked(name: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result
