"""From a name to an environment: an entry point, a module path, or a file.

`calculator` is looked up in the entry point group `agentrt.environments`; `pkg.module` is imported; `path/to/env.py` is
loaded from the file. The last two may name one object in the module, `pkg.module:Name`; an entry point's name may be
followed by what its class is made with, `reasoning_gym:basic_arithmetic`. What is found may be

* a subclass of `Environment`,
* a class with `async def rollout(self, task, agent)`, `tasks` and decorated functions, or
* a module with these as plain functions: `async def rollout(task, agent)`, `tasks(split)`, `tools`, `splits`.

The last two become a subclass of `Environment`, so that the runtime knows one kind only.
"""

import hashlib
import importlib
import inspect
import os
import sys
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import msgspec

from agentrt.core.errors import UsageError, users_code
from agentrt.core.spec import nearest
from agentrt.env.environment import Environment, check
from agentrt.env.rubric import Rubric

GROUP = "agentrt.environments"
MEMBERS = ("rollout", "tasks", "tools", "splits")
"""What a module of functions has of an environment, beside its rewards and metrics; its other names are its own."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What can be said of an environment without running it."""

    name: str
    doc: str
    splits: tuple[str, ...]
    tools: dict[str, str]
    """Name and description of each tool."""
    rewards: dict[str, float]
    """Name and weight of each reward, group rewards included."""
    metrics: tuple[str, ...]
    source_hash: str
    """SHA-256 of the file that defines it: the version of environment and grader in `run.toml`."""


def names() -> list[str]:
    """The names of the installed environments."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load(name: str, **arguments: Any) -> Environment:
    """The environment called `name`, made with `arguments`. `UsageError`, with the nearest name, if there is none."""
    point, _, given = name.partition(":")
    is_given = bool(given) and point in names()
    kind, positional = _adapted(_found(point if is_given else name), name), (given,) if is_given else ()
    try:
        inspect.signature(kind).bind(*positional, **arguments)
    except TypeError as error:
        raise UsageError(f"environment {name}: {_asked_of(kind)}: {error}") from error
    with users_code(f"environment {name}: {kind.__name__}"):
        environment = kind(*positional, **arguments)
        check(environment)
    return environment


def _asked_of(kind: type[Environment]) -> str:
    """What making one takes, for an error."""
    parameters = inspect.signature(kind).parameters.values()
    first = next(
        (one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD), ""
    )
    return f"it is made with a {first}, NAME:{first.upper()}" if first else "wrong environment_args"


def describe(environment: Environment) -> Description:
    """Its docstring, splits, tools, rewards and metrics."""
    rubric, kind = Rubric(environment), type(environment)
    return Description(
        name=kind.__name__,
        doc=inspect.cleandoc(kind.__doc__ or ""),
        splits=tuple(environment.splits),
        tools={tool.name: tool.description for tool in environment.tools},
        rewards={name: weight for name, (_, weight) in (rubric.rewards | rubric.group_rewards).items()},
        metrics=tuple(rubric.metrics),
        source_hash=_source_hash(kind),
    )


def _found(name: str) -> object:
    """The class or module behind a name."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name in points:
        with users_code(f"environment {name}"):
            return points[name].load()
    place, _, attribute = name.partition(":")
    is_file = place.endswith(".py") or os.sep in place
    module = _from_file(Path(place)) if is_file else _imported(place, points)
    if not attribute:
        return module
    if not hasattr(module, attribute):
        raise UsageError(f"{place} has no {attribute!r}; {nearest(attribute, _candidates(module))}")
    found: object = getattr(module, attribute)
    return found


def _imported(path: str, points: Any) -> ModuleType:
    """The module of that path. What is missing inside of it is its author's to see."""
    with users_code(f"environment {path}"):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise
        except (TypeError, ValueError):
            if all(path.split(".")):  # it is not "..x" or "", which are no paths
                raise
    raise UsageError(
        f"unknown environment {path!r}; {nearest(path, points)} (a module path or a file, x.py, is possible too)"
    )


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{path}: no such file; an environment is a name, a module path or a file")
    file = path.resolve()
    name = str(file.with_suffix("")).replace(".", "_")  # the stem may be the name of somebody else's module: queue.py
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: not a Python file; an environment's file ends in .py")
    module = sys.modules[name] = module_from_spec(spec)
    with users_code(f"environment {path}"):
        spec.loader.exec_module(module)
    return module


def _adapted(found: object, name: str) -> type[Environment]:
    """The `Environment` subclass that `found` is, holds or makes."""
    if isinstance(found, ModuleType):
        return _of_module(found, name)
    if not isinstance(found, type):
        raise UsageError(f"{name}: {found!r} is neither a class nor a module; an environment is one of them")
    if issubclass(found, Environment):
        return found
    _require(found, name)
    return type(found.__name__, (found, Environment), {"__doc__": found.__doc__, "__module__": found.__module__})


def _of_module(module: ModuleType, name: str) -> type[Environment]:
    """The one environment class defined in a module, or the module's functions as the methods of one."""
    classes = _candidates(module)
    if len(classes) > 1 and not hasattr(module, "rollout"):
        raise UsageError(f"{name} holds {len(classes)} environments; choose one: {name}:{classes[0]}")
    if len(classes) == 1:
        return _adapted(getattr(module, classes[0]), name)
    _require(module, name)
    rubric = Rubric(module)
    meant = {*MEMBERS, *rubric.rewards, *rubric.metrics, *rubric.group_rewards}
    own = {key: value for key, value in vars(module).items() if key in meant}
    members = {key: staticmethod(value) if isinstance(value, FunctionType) else value for key, value in own.items()}
    return type(
        Path(module.__name__).name, (Environment,), members | {"__doc__": module.__doc__, "__module__": module.__name__}
    )


def _candidates(module: ModuleType) -> list[str]:
    """Names of the environment classes that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
        and (issubclass(value, Environment) or hasattr(value, "rollout"))
    ]  # fmt: skip


def _require(found: Any, name: str) -> None:
    """`found` has what an environment needs."""
    if not inspect.iscoroutinefunction(getattr(found, "rollout", None)):
        raise UsageError(f"{name}: no environment in it: neither a subclass of Environment nor `async def rollout`")
    if not callable(getattr(found, "tasks", None)):
        raise UsageError(f"{name}: no tasks; define `async def tasks(split)` that yields Task(id, messages, data)")


def _source_hash(kind: type[Environment]) -> str:
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
    except OSError:
        return ""
