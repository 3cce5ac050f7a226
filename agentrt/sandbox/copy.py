"""`copy`: what a folder that hostile code has filled, and may still be changing, holds, into another one.

Regular files with their data (holes stay holes), folders, and links as links, never followed. What else there is (pipes,
sockets), what cannot be read and what lies deeper than `MAX_DEPTH` is left out.
"""

import errno
import os
import stat
from contextlib import ExitStack
from pathlib import Path

MAX_DEPTH = 64
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = _READ | os.O_DIRECTORY
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""What no folder is the reason of: then the copy would lack what the original has."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def copy(source: Path, target: Path) -> None:
    """Copy what is in `source` into `target`, an empty folder in which nothing runs, and whose owner owns the copies.

    By descriptors alone: a folder that becomes a link meanwhile leads nowhere. Raises `OSError` if this machine has no room.
    """
    owner = target.stat()
    with ExitStack() as opened:
        theirs = os.open(source, _FOLDER)
        opened.callback(os.close, theirs)
        ours = os.open(target, _FOLDER)
        opened.callback(os.close, ours)
        _copy_folder(theirs, ours, (owner.st_uid, owner.st_gid), 0)


def _copy_folder(source: int, target: int, owner: tuple[int, int], depth: int) -> None:
    for name in os.listdir(source):
        try:
            _copy_entry(name, source, target, owner, depth)
        except OSError as error:
            if error.errno in _OURS:
                raise
            # else it has gone, or may not be read


def _copy_entry(name: str, source: int, target: int, owner: tuple[int, int], depth: int) -> None:
    mode = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        os.chown(name, *owner, dir_fd=target, follow_symlinks=False)
        return
    is_folder = stat.S_ISDIR(mode)
    if not (is_folder and depth < MAX_DEPTH) and not stat.S_ISREG(mode):
        return
    with ExitStack() as opened:
        theirs = os.open(name, _FOLDER if is_folder else _READ, dir_fd=source)
        opened.callback(os.close, theirs)
        found = os.fstat(theirs)
        if stat.S_IFMT(found.st_mode) != stat.S_IFMT(mode):
            return
        if is_folder:
            os.mkdir(name, 0o700, dir_fd=target)
        ours = os.open(name, _FOLDER if is_folder else _CREATE, 0o600, dir_fd=target)
        opened.callback(os.close, ours)
        if is_folder:
            _copy_folder(theirs, ours, owner, depth + 1)
        else:
            _copy_data(theirs, ours, found.st_size)
        os.fchown(ours, *owner)
        os.fchmod(ours, stat.S_IMODE(found.st_mode) & 0o777)


def _copy_data(source: int, target: int, size: int) -> None:
    os.ftruncate(target, size)
    end = 0
    while end < size:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # a hole up to the end
        end = os.lseek(source, start, os.SEEK_HOLE)
        os.lseek(source, start, os.SEEK_SET)
        os.lseek(target, start, os.SEEK_SET)
        while start < min(end, size) and (sent := os.sendfile(target, source, start, min(end, size) - start)):
            start += sent
