"""seccomp: system calls that a tool has no business with fail, for good, in the process and all its children.

Allowed by default. Denied: sockets (but pairs of Unix ones, and TCP over IPv4 where a call has a port), io_uring,
namespaces, mounts, ptrace and the like, keyrings, System V and POSIX IPC, memfd (memory that no limit counts), bpf,
modules, clocks, limits and priorities of any process but the caller (its supervisor is of the same user). `clone3` is
ENOSYS, so that libc falls back to `clone`, whose flags a filter can read; so is everything newer than `LAST_KNOWN`. The
32-bit ABI is killed.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Iterator
from typing import NamedTuple

from . import linux

LAST_KNOWN = 462
"""mseal, of Linux 6.10: calls that came later may do what nobody here has thought of."""


class Machine(NamedTuple):
    """How one architecture is told apart, and the numbers of its calls."""

    audit: int
    foreign_bit: int
    """Set in call numbers of another ABI under the same `audit` number (x32); 0 where there is none."""
    denied: tuple[int, ...]
    of_itself: tuple[int, ...]
    """Their first argument says whose process, and must be 0, the caller's: prlimit64, sched_setparam, sched_setscheduler,
    sched_setaffinity, sched_setattr."""
    setpriority: int
    ioprio_set: int
    clone: int
    socket: int
    socketpair: int
    ioctl: int


_DENIED_ANYWHERE = (
    425, 426, 427,  # io_uring_setup, _enter, _register
    428, 429, 430, 431, 432, 433, 442,  # open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr
    438, 440,  # pidfd_getfd, process_madvise
    447, 457, 458,  # memfd_secret, statmount, listmount
)  # fmt: skip

_X86_64 = Machine(
    audit=0xC000_003E, foreign_bit=0x4000_0000, clone=56, socket=41, socketpair=53, ioctl=16, setpriority=141,
    ioprio_set=251, of_itself=(302, 142, 144, 203, 314),
    denied=(
        *_DENIED_ANYWHERE,
        101, 310, 311, 312,  # ptrace, process_vm_readv, process_vm_writev, kcmp
        298, 321, 323,  # perf_event_open, bpf, userfaultfd
        248, 249, 250,  # add_key, request_key, keyctl
        165, 166, 155, 161, 167, 168, 272, 308,  # mount, umount2, pivot_root, chroot, swapon, swapoff, unshare, setns
        303, 304,  # name_to_handle_at, open_by_handle_at
        29, 30, 31, 67, 64, 65, 66, 220, 68, 69, 70, 71,  # shm*, sem*, msg*
        240, 241, 242, 243, 244, 245,  # mq_*
        319,  # memfd_create
        175, 176, 313, 246, 320, 169,  # init_module, delete_module, finit_module, kexec_load, kexec_file_load, reboot
        164, 227, 159, 305,  # settimeofday, clock_settime, adjtimex, clock_adjtime
        135, 154, 172, 173, 163, 179, 153,  # personality, modify_ldt, iopl, ioperm, acct, quotactl, vhangup
        103, 170, 171, 300, 301, 237, 238, 239, 256, 279,  # syslog, set*name, fanotify_*, memory policies
        162, 306,  # sync, syncfs: they wait, deaf to any signal, for what all others have written
    ),
)  # fmt: skip

_AARCH64 = Machine(
    audit=0xC000_00B7, foreign_bit=0, clone=220, socket=198, socketpair=199, ioctl=29, setpriority=140,
    ioprio_set=30, of_itself=(261, 118, 119, 122, 274),
    denied=(
        *_DENIED_ANYWHERE,
        117, 270, 271, 272,  # ptrace, process_vm_readv, process_vm_writev, kcmp
        241, 280, 282,  # perf_event_open, bpf, userfaultfd
        217, 218, 219,  # add_key, request_key, keyctl
        40, 39, 41, 51, 224, 225, 97, 268,  # mount, umount2, pivot_root, chroot, swapon, swapoff, unshare, setns
        264, 265,  # name_to_handle_at, open_by_handle_at
        194, 195, 196, 197, 190, 191, 192, 193, 186, 187, 188, 189,  # shm*, sem*, msg*
        180, 181, 182, 183, 184, 185,  # mq_*
        279,  # memfd_create
        105, 106, 273, 104, 294, 142,  # init_module, delete_module, finit_module, kexec_load, kexec_file_load, reboot
        170, 112, 171, 266,  # settimeofday, clock_settime, adjtimex, clock_adjtime
        92, 89, 60, 58,  # personality, acct, quotactl, vhangup
        116, 161, 162, 262, 263, 235, 236, 237, 238, 239,  # syslog, set*name, fanotify_*, memory policies
        81, 267,  # sync, syncfs: they wait, deaf to any signal, for what all others have written
    ),
)  # fmt: skip

MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}

_AF_UNIX, _AF_INET = 1, 2
_SOCK_STREAM, _NOT_A_TYPE = 1, 0xFFFF_FFFF & ~(0o2000000 | 0o4000)
"""A socket's type, without SOCK_CLOEXEC and SOCK_NONBLOCK."""
_IPPROTO_TCP = 6
_CLONE3 = 435
_TERMINAL_IOCTLS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: they type into the terminal of others."""
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1, _ARGUMENT_2 = 0, 4, 16, 24, 32
"""Offsets into what the kernel shows a filter; an argument's low half comes first."""
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def is_known() -> bool:
    """True if this machine's calls have numbers here."""
    return platform.machine() in MACHINES


def own_program(*, has_tcp: bool) -> bytes:
    """The filter of this machine, which must be known; `has_tcp`: TCP sockets over IPv4 can be made."""
    return program(MACHINES[platform.machine()], has_tcp=has_tcp)


def program(machine: Machine, *, has_tcp: bool = False) -> bytes:
    """The filter for one architecture, in the kernel's form."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(machine, has_tcp))


def install(filter_bytes: bytes) -> None:
    """Put a filter on this process, for good. Needs no_new_privs. Raises `OSError`."""
    linux.prctl_pointer(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _Program(len(filter_bytes) // 8, filter_bytes))


def _instructions(machine: Machine, has_tcp: bool) -> Iterator[tuple[int, int, int, int]]:
    """(operation, instructions to skip if true, if false, operand). Every test is followed by its own verdict."""
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield from _unless(_JUMP_EQUAL, machine.audit, _KILL_PROCESS)
    yield _LOAD, 0, 0, _NUMBER
    if machine.foreign_bit:
        yield from _if(_JUMP_ANY_BIT, machine.foreign_bit, _KILL_PROCESS)
    yield from _if(_JUMP_EQUAL, _CLONE3, _ERRNO | errno.ENOSYS)
    yield from _if(_JUMP_ABOVE, LAST_KNOWN, _ERRNO | errno.ENOSYS)
    if has_tcp:
        yield from _on_argument(machine.socket, _ARGUMENT_0, _TCP_ONLY)
    else:
        yield from _if(_JUMP_EQUAL, machine.socket, _ERRNO | errno.EACCES)
    for number in machine.denied:
        yield from _if(_JUMP_EQUAL, number, _ERRNO | errno.EPERM)
    itself = [*_unless(_JUMP_EQUAL, 0, _ERRNO | errno.EPERM)]
    for number in machine.of_itself:
        yield from _on_argument(number, _ARGUMENT_0, itself)
    for number, kind in ((machine.setpriority, _PRIO_PROCESS), (machine.ioprio_set, _IOPRIO_WHO_PROCESS)):
        one = [*_unless(_JUMP_EQUAL, kind, _ERRNO | errno.EPERM), (_LOAD, 0, 0, _ARGUMENT_1), *itself]
        yield from _on_argument(number, _ARGUMENT_0, one)
    clone = [*_if(_JUMP_ANY_BIT, linux.CLONE_NEW_ANY, _ERRNO | errno.EPERM)]
    yield from _on_argument(machine.clone, _ARGUMENT_0, clone)
    yield from _on_argument(machine.socketpair, _ARGUMENT_0, [*_unless(_JUMP_EQUAL, _AF_UNIX, _ERRNO | errno.EACCES)])
    typing = [step for code in _TERMINAL_IOCTLS for step in _if(_JUMP_EQUAL, code, _ERRNO | errno.EPERM)]
    yield from _on_argument(machine.ioctl, _ARGUMENT_1, typing)
    yield _RETURN, 0, 0, _ALLOW


def _if(test: int, operand: int, verdict: int) -> Iterator[tuple[int, int, int, int]]:
    yield test, 0, 1, operand
    yield _RETURN, 0, 0, verdict


def _unless(test: int, operand: int, verdict: int) -> Iterator[tuple[int, int, int, int]]:
    yield test, 1, 0, operand
    yield _RETURN, 0, 0, verdict


_TCP_ONLY = [
    *_unless(_JUMP_EQUAL, _AF_INET, _ERRNO | errno.EACCES),
    (_LOAD, 0, 0, _ARGUMENT_1),
    (_AND, 0, 0, _NOT_A_TYPE),
    *_unless(_JUMP_EQUAL, _SOCK_STREAM, _ERRNO | errno.EACCES),
    (_LOAD, 0, 0, _ARGUMENT_2),
    (_JUMP_EQUAL, 1, 0, 0),
    *_unless(_JUMP_EQUAL, _IPPROTO_TCP, _ERRNO | errno.EACCES),
]
"""What a `socket` call must be; other protocols of a stream (MPTCP, SCTP) are kernel code that nobody needs here."""


def _on_argument(
    number: int, offset: int, body: list[tuple[int, int, int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """For one call: load an argument, go through `body`, else allow."""
    yield _JUMP_EQUAL, 0, len(body) + 2, number
    yield _LOAD, 0, 0, offset
    yield from body
    yield _RETURN, 0, 0, _ALLOW
