"""Where a model's folder is: shipped with agentrt, pulled into the user's cache, or a path."""

import os
from pathlib import Path

from agentrt.core.errors import UsageError
from agentrt.core.spec import nearest

SHIPPED = Path(__file__).parent.parent / "models"


def cache_folder() -> Path:
    """Where pulled models lie: `$XDG_CACHE_HOME/agentrt/models`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrt" / "models"


def find_model(name: str) -> Path:
    """The folder of a model by name or path (config.json, tokenizer.json, *.safetensors); `UsageError` if there is none."""
    candidates = [SHIPPED / name, cache_folder() / name, Path(name)]
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
    if Path(name).is_dir():
        raise UsageError(f"model {name}: the folder has no config.json; give the folder of a Hugging Face model")
    known = {path.parent.name for base in (SHIPPED, cache_folder()) for path in base.glob("*/config.json")}
    raise UsageError(f"unknown model {name!r}; {nearest(name, known)} (a folder with a model works too)")
