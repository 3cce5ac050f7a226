"""Files that an episode starts with: written into its folder while nothing has run there yet."""

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath


def put(folder: Path, files: Mapping[str, str]) -> None:
    """Write each text to its path below `folder`, which belongs to whoever will run the tools; so do the files.

    Raises `ValueError` as `check` does. Call it before any tool: it trusts what is there.
    """
    check(files)
    owner = folder.stat()
    for name, text in files.items():
        path = PurePosixPath(name)
        parents = [folder / parent for parent in reversed(path.parents[:-1])]
        for parent in parents:
            parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8", newline="")
        if owner.st_uid != os.geteuid():
            for made in (*parents, folder / path):
                os.chown(made, owner.st_uid, owner.st_gid)


def check(files: Mapping[str, str]) -> None:
    """Raise `ValueError` for a path that leads out of the folder or through a file, and for what is no text."""
    paths = {PurePosixPath(name) for name in files}
    for name, text in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(f"{name!r} is no path inside the episode's folder")
        if through := paths & set(path.parents):
            raise ValueError(f"{name!r} is below {str(through.pop())!r}, which is a file too")
        if not isinstance(text, str):
            raise ValueError(f"{name!r} is a {type(text).__name__}, not a text")
