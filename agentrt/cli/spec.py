"""From options to a `RunSpec`: the file first, then the named options, then each `--set`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrt.core.errors import UsageError
from agentrt.core.spec import RunSpec, convert, load_toml, override


def build_spec(config: Path | None, options: dict[str, Any], assignments: Sequence[str]) -> RunSpec:
    """The spec that file, options (None: not given) and assignments make together; `UsageError` for what is wrong."""
    data = load_toml(config) if config is not None else {}
    data = override(data | {name: value for name, value in options.items() if value is not None}, assignments)
    if "environment" not in data:
        raise UsageError("no environment given; try `agentrt run calculator`, or `agentrt describe` for the names")
    return convert(data, RunSpec, str(config) if config is not None else "the run's spec")
