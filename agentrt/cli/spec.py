"""From options to a `RunSpec`: the command's defaults, the file, the named options, then each `--set`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrt.core.errors import UsageError
from agentrt.core.spec import Purpose, RunSpec, load_toml, override, run_spec
from agentrt.rollout.sink import require_same, stored_run

DEFAULTS: dict[Purpose, dict[str, Any]] = {"run": {}, "eval": {"split": "eval", "groups": 32}}
"""Where a command's defaults are not those of the spec."""


def chosen_spec(
    purpose: Purpose,
    config: Path | None,
    options: Mapping[str, Any],
    assignments: Sequence[str],
    resume: Path | None,
    output: Path | None,
) -> RunSpec:
    """The spec asked for. A resumed run has its own; asking for another one at the same time is refused."""
    if resume is None:
        return build_spec(purpose, config, options, assignments)
    if output is not None and output != resume:
        raise UsageError("--resume goes on in its own folder; leave -o out")
    stored = stored_run(resume).spec
    if stored.purpose != purpose:
        raise UsageError(f"{resume} was made by `agentrt {stored.purpose}`; resume it with that")
    if config is not None or assignments or any(value is not None for value in options.values()):
        given = build_spec(purpose, config, {"environment": stored.environment} | _given(options), assignments)
        require_same(resume, stored, given)
    return stored


def build_spec(
    purpose: Purpose, config: Path | None, options: Mapping[str, Any], assignments: Sequence[str]
) -> RunSpec:
    """The spec that file, options (None: not given) and assignments make together; `UsageError` for what is wrong."""
    data = DEFAULTS[purpose] | (_of_file(config) if config is not None else {})
    data = override(data | _given(options), assignments) | {"purpose": purpose}
    if "environment" not in data:
        raise UsageError(
            f"no environment given; try `agentrt {purpose} calculator`, or `agentrt describe` for the names"
        )
    return run_spec(data, str(config) if config is not None else "the run's spec")


def _of_file(path: Path) -> dict[str, Any]:
    """What a file says of a spec. The `run.toml` of a folder holds that of its run in a table of its own."""
    data = load_toml(path)
    return spec if isinstance(spec := data.get("spec"), dict) else data


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def servers(urls: Sequence[str] | None) -> list[str]:
    """The assignment that `--engine URL` stands for."""
    return [f"engine.urls={json.dumps(list(urls))}"] if urls else []
