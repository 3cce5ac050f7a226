"""Tools as TypeScript, as Harmony's developer message lists them, with its habits; types it cannot say are `any`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrt.env.chat.renderer import ToolDescription

_NAMES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}

Schema = Mapping[str, Any]


def namespace(name: str, tools: Sequence[ToolDescription]) -> str:
    """All tools of a namespace."""
    functions = "".join(_function(tool) for tool in tools)
    return f"## {name}\n\nnamespace {name} {{\n\n{functions}}} // namespace {name}"


def _function(tool: ToolDescription) -> str:
    comment = "".join(f"// {line}\n" for line in tool.description.splitlines())
    return f"{comment}type {tool.name} = (_: {_type(tool.parameters, '')}) => any;\n\n"


def _type(schema: Any, indent: str) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(kind, list):
        return " | ".join("null" if one == "null" else _type({**schema, "type": one}, indent) for one in kind)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        text = f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    elif kind == "string" and schema.get("enum"):
        text = " | ".join(f'"{value}"' for value in schema["enum"])
    else:
        text = _NAMES.get(str(kind), "any")
    return text + (" | null" if kind is not None and schema.get("nullable") else "")


def _object(schema: Schema, indent: str) -> str:
    required = schema.get("required", ())
    properties = schema.get("properties", {}).items()
    lines = (_property(name, item, indent, optional=name not in required) for name, item in properties)
    return f"{{\n{''.join(lines)}{indent}}}"


def _property(name: str, schema: Schema | bool, indent: str, *, optional: bool) -> str:
    schema = _keys(schema)
    head, default = f"{indent}{name}{'?' if optional else ''}:", _default(schema)
    if variants := schema.get("oneOf"):
        comment = _comment(schema, indent) + (f"{indent}// {default}\n" if default else "")
        lines = "".join(f"{indent} | {_variant(variant, indent + '   ')}\n" for variant in variants)
        return f"{comment}{head}\n{lines}{indent},\n"
    ending = f", // {default}" if default else ","
    return f"{_comment(schema, indent)}{head} {_type(schema, indent + '    ')}{ending}\n"


def _variant(schema: Schema | bool, indent: str) -> str:
    schema = _keys(schema)
    note = _default(schema) or schema.get("description")
    return _type(schema, indent) + (f" // {note}" if note else "")


def _keys(schema: Schema | bool) -> Schema:
    """A schema that only says yes or no says nothing of a type."""
    return {} if isinstance(schema, bool) else schema


def _comment(schema: Schema, indent: str) -> str:
    title, description = schema.get("title"), schema.get("description")
    examples = [example for example in schema.get("examples", ()) if isinstance(example, str)]
    comment = f"{indent}// {title}\n{indent}//\n" if title else ""
    comment += f"{indent}// {description}\n" if description else ""
    comment += f"{indent}// Examples:\n" if examples else ""
    return comment + "".join(f'{indent}// - "{example}"\n' for example in examples)


def _default(schema: Schema) -> str:
    if "default" not in schema:
        return ""
    value = schema["default"]
    is_bare = isinstance(value, str) and schema.get("enum")
    return f"default: {value if is_bare else json.dumps(value, ensure_ascii=False)}"
