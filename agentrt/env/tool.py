"""`Tool`: a program that the model may call, and what the model is told of it.

A tool is a program with a manifest beside it: `calculator.py` and `calculator.toml` (name, description, JSON schema of
the arguments; protocol, limits, what it may read). It runs by the contract of `agentrt.sandbox.channel`, in an
interpreter that sees no site-packages and no PYTHON variables (`-I -S`), unless its manifest names `imports`.
"""

import math
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentrt.core.errors import UsageError
from agentrt.core.spec import convert, load_toml, nearest
from agentrt.env.schema import validator
from agentrt.sandbox.level import Level
from agentrt.sandbox.terms import DEFAULT_TERMS, Terms, ToolLimits

MCP = "mcp:"
SHIPPED = "agentrt_tools"
"""The package whose programs are found by name."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """One callable program."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""
    argv: tuple[str, ...]
    terms: Terms = DEFAULT_TERMS

    def refusal(self, arguments: dict[str, Any]) -> str:
        """Why `arguments` cannot be passed on, in words for the model and with the place; empty if they can."""
        place = _not_finite(arguments, "arguments")
        if place:
            return f"{place} is not a finite number"
        error = _first_error(self.parameters, arguments)
        if error is None:
            return ""
        return f"{'.'.join(['arguments', *map(str, error.absolute_path)])}: {error.message}"


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    description: str
    parameters: dict[str, Any]
    program: str | None = None
    """Without it, the manifest's own name with `.py`. What is no `.py` must be executable."""
    protocol: Literal["oneshot", "worker", "shared"] = "oneshot"
    limits: ToolLimits = ToolLimits()
    imports: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    """Beyond the program itself; relative paths are from the manifest's folder."""
    environment: dict[str, str] = {}
    """Variables beyond `PATH`, `HOME`, `LANG`, `TERM`, `TMPDIR`; for all to read, so no place for secrets."""
    max_concurrency: int | None = None
    min_isolation: Literal["L1", "L2", "L3"] = "L2"


def tool(name_or_path: str | os.PathLike[str] | Callable[..., Any]) -> Tool:
    """The tool of that name among the shipped ones, or the one at that path (its program, `x.py`, or its manifest),
    or the only one of the MCP server that `mcp:COMMAND` starts (of several: `agentrt.env.mcp.mcp_tools`).
    As a decorator of a function: the tool that calls it, see `agentrt.env.function`.

    Raises `UsageError` for an unknown name (with the nearest one) and for a missing or wrong manifest.
    """
    if callable(name_or_path):
        from agentrt.env.function import function_tool  # here, because it builds on this module

        return function_tool(name_or_path)
    text = os.fspath(name_or_path)
    if text.startswith(MCP):
        return _only_tool(text.removeprefix(MCP))
    if text.endswith((".py", ".toml")) or os.sep in text:
        return _load(Path(text).with_suffix(".toml"))
    manifests = _shipped()
    if text not in manifests:
        raise UsageError(f"unknown tool {text!r}; {nearest(text, manifests)}")
    return _load(manifests[text])


def _only_tool(command: str) -> Tool:
    from agentrt.env.mcp import mcp_tools  # here, because it builds on this module

    found = mcp_tools(command)
    if len(found) != 1:
        names = ", ".join(each.name for each in found)
        raise UsageError(f"{command}: the server has {len(found)} tools ({names}); take them with `mcp_tools`")
    return found[0]


def shipped() -> list[str]:
    """The names of the shipped tools, in order."""
    return sorted(_shipped())


def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in shipped_folder().glob("*.toml")}


def _load(path: Path) -> Tool:
    if not path.is_file():
        raise UsageError(f"{path}: no such file; a tool is a program, x.py, with its manifest x.toml beside it")
    manifest = convert(load_toml(path), _Manifest, str(path))
    folder = path.resolve().parent
    program = folder / (manifest.program or f"{path.stem}.py")
    if not program.is_file():
        raise UsageError(f"{program}: no such file; it is the program of {path}")
    own = folder if folder == shipped_folder() else program  # all shipped tools share a zygote
    argv: tuple[str, ...] = (str(program),)
    if program.suffix == ".py":
        argv = (os.path.realpath(sys.executable), "-I", "-S", *argv)
    terms = Terms(
        protocol=manifest.protocol, limits=manifest.limits, imports=manifest.imports,
        readable=(str(own), *(str(folder / path) for path in manifest.readable)),
        environment=manifest.environment, max_concurrency=manifest.max_concurrency,
        min_isolation=Level[manifest.min_isolation],
    )  # fmt: skip
    return Tool(
        name=manifest.name, description=manifest.description, parameters=manifest.parameters, argv=argv, terms=terms
    )


def shipped_folder() -> Path:
    """Where the shipped programs and manifests are."""
    spec = find_spec(SHIPPED)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"the package {SHIPPED} is not installed; install agentrt again")
    return Path(spec.submodule_search_locations[0]).resolve()


def _first_error(schema: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """The most telling violation, or None."""
    if not schema:  # it takes anything
        return None
    from jsonschema.exceptions import best_match  # here, because it takes 0.2 s and only calls need it

    return best_match(validator(schema).iter_errors(arguments))


def _not_finite(value: Any, place: str) -> str:
    """Where in `value` the first NaN or infinity is; empty without one."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next((found for key, item in items if (found := _not_finite(item, f"{place}.{key}"))), "")
