"""`remove`: deletes a folder that hostile code has filled: any depth, closed folders, links to anywhere."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path


def remove(folder: Path) -> None:
    """Delete `folder` and all in it, links themselves and not what they point to. What cannot be deleted stays.

    Nobody else may be changing it. A folder inside is moved up before it is emptied, so no path grows long.
    """
    names = (f"{folder}.{number}" for number in count())
    left = [os.fspath(folder)]
    while left:
        path = left.pop()
        with suppress(OSError):
            os.chmod(path, 0o700)
            for name in os.listdir(path):
                with suppress(OSError):
                    _remove_entry(os.path.join(path, name), names, left)
            os.rmdir(path)


def _remove_entry(path: str, names: Iterator[str], folders: list[str]) -> None:
    """Unlink a file; move a folder up, and note it."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    os.chmod(path, 0o700)
    os.rename(path, moved := next(names))
    folders.append(moved)
