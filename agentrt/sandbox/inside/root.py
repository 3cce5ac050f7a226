"""The file tree inside namespaces: a small read-only root, the episode's folder at /w, and memory-backed /tmp.

`build` makes the part that all calls share, once; `enter` a slot's own, once; `furnish` and `open_folder` a call's, which
`clear` takes away. Nothing of the host is there but what is named: no home, no /etc, no devices but the harmless ones, no
process but the call's own.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from . import linux
from .job import EPISODES, FOLDER, FOLDERS, Limits

USER = 1000
"""The user and group that a call sees itself as."""
SYSTEM = ("/usr", "/etc/ld.so.cache", "/etc/alternatives")
MERGED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Links into /usr on most systems, folders on others."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_OLD = "/.old"
_SHM_BYTES = 4 << 20
_SAFE = linux.MS_NOSUID | linux.MS_NODEV
_FILES = {
    "/etc/passwd": f"sandbox:x:{USER}:{USER}::{FOLDER}:/bin/sh\n",
    "/etc/group": f"sandbox:x:{USER}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}


def build(root: str, readable: Iterable[str], episodes: str) -> bool:
    """Make `root` the root of this mount namespace; False if no /proc can be had (it is masked, as in containers)."""
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", root, "tmpfs", _SAFE, "size=1m,mode=755")
    for folder in (_OLD, EPISODES, FOLDER, "/proc", "/dev", "/tmp", "/etc"):
        os.makedirs(root + folder)
    for path, text in _FILES.items():
        with open(root + path, "w") as file:
            file.write(text)
    for path in MERGED:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
    for path in (*SYSTEM, *(path for path in MERGED if not os.path.islink(path)), *readable):
        _bind(path, root)
    linux.restrict_mounts(root, linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV)
    linux.mount("tmpfs", root + "/dev", "tmpfs", linux.MS_NOSUID, "size=64k,mode=755")
    os.mkdir(root + "/dev/shm")
    for path in DEVICES:
        _bind(path, root)
    for name, target in _LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    linux.mount("", root + "/dev", flags=linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY | linux.MS_NOSUID)
    linux.mount(episodes, root + EPISODES, flags=linux.MS_BIND)
    linux.restrict_mounts(root + EPISODES, linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV)
    has_proc = _proc(root + "/proc")
    if not has_proc:
        linux.mount("/proc", root + "/proc", flags=linux.MS_BIND | linux.MS_REC)  # for uid maps, and what calls use
    linux.pivot_root(root, root + _OLD)
    os.chdir("/")
    linux.unmount(_OLD)
    _mount_tmp(readable, "size=16m,mode=1777")  # some packages write there when they are imported
    linux.sethostname("sandbox")
    return has_proc


def enter(has_proc: bool) -> tuple[int, int]:
    """In the new namespaces of a slot: no episode's folder any more but through the first descriptor returned, and its /proc.

    If none can be had, a call finds nothing at /proc. The second descriptor is of that, or else of the zygote's, which
    shows a call's processes too.
    """
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    proc = os.open("/proc", FOLDERS)
    if has_proc and _proc("/proc"):
        os.close(proc)
        proc = os.open("/proc", FOLDERS)
    else:
        linux.mount("tmpfs", "/proc", "tmpfs", _SAFE | linux.MS_RDONLY, "size=4k,mode=555")
    episodes = os.open(EPISODES, FOLDERS)
    linux.mount(_OLD, EPISODES, flags=linux.MS_BIND)  # what is empty covers them
    return episodes, proc


def furnish(readable: Iterable[str]) -> None:
    """For one call that is to come: its /tmp and its /dev/shm, yet without a size."""
    _mount_tmp(readable, "size=4k,mode=1777")
    linux.mount("tmpfs", "/dev/shm", "tmpfs", _SAFE, "size=4k,mode=1777")


def open_folder(folder: int, limits: Limits) -> None:
    """The call has come: its episode's folder at /w, and /tmp of the size that it may have."""
    linux.bind(folder, FOLDER)
    for path, size in (("/tmp", limits.tmp_bytes), ("/dev/shm", min(_SHM_BYTES, limits.tmp_bytes))):
        linux.mount("tmpfs", path, "tmpfs", _SAFE | linux.MS_REMOUNT, f"nr_inodes={limits.inodes},size={size}")


def clear() -> None:
    """The call has ended: undo `open_folder` and `furnish`."""
    for path in (FOLDER, "/tmp", "/dev/shm"):
        linux.unmount(path)


def map_user(inside: int, uid: int, gid: int) -> None:
    """Become user `inside` of the user namespace just entered, who is `uid` outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def _mount_tmp(readable: Iterable[str], options: str) -> None:
    with _kept(path for path in readable if path.startswith("/tmp/")):
        linux.mount("tmpfs", "/tmp", "tmpfs", _SAFE, options)


def _proc(target: str) -> bool:
    with suppress(PermissionError):
        linux.mount("proc", target, "proc", _SAFE | linux.MS_NOEXEC)
        return True
    return False


def _bind(path: str, root: str) -> None:
    """Put what is at `path` at the same place under `root`; nothing if it does not exist or is there already."""
    target = root + path
    if os.path.exists(path) and not os.path.exists(target):
        _mount_point(target, is_folder=os.path.isdir(path))
        linux.mount(path, target, flags=linux.MS_BIND | linux.MS_REC)


def _mount_point(target: str, *, is_folder: bool) -> None:
    if is_folder:
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


@contextmanager
def _kept(paths: Iterable[str]) -> Iterator[None]:
    """Put what is at these paths back there after the block, which hides it."""
    kept = {path: os.open(path, os.O_PATH) for path in paths if os.path.exists(path)}
    are_folders = {path: os.path.isdir(path) for path in kept}
    yield
    for path, fd in kept.items():
        if not os.path.exists(path):
            _mount_point(path, is_folder=are_folders[path])
            linux.bind(fd, path)
        os.close(fd)
