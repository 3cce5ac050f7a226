"""Files that an episode starts with: written into its folder while nothing has run there yet."""

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath


def put(folder: Path, files: Mapping[str, str]) -> None:
    """Write each text to its path below `folder`, which belongs to whoever will run the tools; so do the files.

    Raises `ValueError` for a path that leads out of the folder. Call it before any tool: it trusts what is there.
    """
    owner = folder.stat()
    for name, text in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"{name!r} is no path inside the episode's folder")
        parents = [folder / parent for parent in reversed(path.parents[:-1])]
        for parent in parents:
            parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8", newline="")
        if owner.st_uid != os.geteuid():
            for made in (*parents, folder / path):
                os.chown(made, owner.st_uid, owner.st_gid)
