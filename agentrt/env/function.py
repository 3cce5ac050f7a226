"""A typed Python function as a tool: its name, its docstring and its annotations are the declaration.

It runs in the sandbox like every tool, so it is taken along as text: it stands alone, imports inside itself what it needs
from the standard library, and knows nothing of the module around it.
"""

import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from agentrt.core.errors import UsageError
from agentrt.env.tool import Tool, shipped_folder
from agentrt.sandbox.terms import Terms

PROGRAM = "called.py"


def function_tool(function: Callable[..., Any]) -> Tool:
    """The tool that calls `function`. Raises `UsageError` if it has no docstring or a parameter has no type."""
    name = function.__name__
    if not function.__doc__:
        raise UsageError(f"the function {name} is a tool and needs a docstring, which the model reads")
    folder = shipped_folder()
    return Tool(
        name=name,
        description=inspect.cleandoc(function.__doc__),
        parameters=_schema(function),
        argv=(os.path.realpath(sys.executable), "-I", "-S", str(folder / PROGRAM), name, _source(function)),
        terms=Terms(readable=(str(folder),)),
    )


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(f"parameter {name} of the function {function.__name__}, a tool, has no type of its own")
    schemas, named = msgspec.json.schema_components([hints[name] for name in parameters], ref_template="#/$defs/{name}")
    properties, required = dict(zip(parameters, schemas, strict=True)), list[str]()
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty:
            required.append(name)
        else:
            properties[name]["default"] = msgspec.to_builtins(parameter.default)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return schema | ({"$defs": named} if named else {})


def _source(function: Callable[..., Any]) -> str:
    """Its text without decorators and annotations, whose names are not there where it runs."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError) as error:
        raise UsageError(f"the source of the function {function.__name__}, a tool, cannot be found: {error}") from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or inspect.iscoroutinefunction(function):
        raise UsageError(f"{function.__name__} is a tool and must be an ordinary function")
    definition.decorator_list, definition.returns = [], None
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    return ast.unparse(tree)
