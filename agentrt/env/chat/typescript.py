"""Tools as TypeScript, as Harmony's developer message lists them; types it cannot say are `any`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrt.env.chat.renderer import ToolDescription

_NAMES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}


def namespace(name: str, tools: Sequence[ToolDescription]) -> str:
    """All tools of a namespace."""
    functions = "".join(f"{_comment(tool.description, '')}type {tool.name} = {_signature(tool)};\n\n" for tool in tools)
    return f"## {name}\n\nnamespace {name} {{\n\n{functions}}} // namespace {name}"


def _signature(tool: ToolDescription) -> str:
    if not tool.parameters.get("properties"):
        return "() => any"
    return f"(_: {_type(tool.parameters, '')}) => any"


def _type(schema: Any, indent: str) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    if variants := schema.get("oneOf") or schema.get("anyOf"):
        return " | ".join(_type(variant, indent) for variant in variants)
    if enum := schema.get("enum"):
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in enum)
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_type({**schema, "type": one}, indent) for one in kind)
    if kind == "object" or "properties" in schema:
        return _object(schema, indent)
    if kind == "array":
        return f"{_type(schema.get('items'), indent)}[]"
    return _NAMES.get(str(kind), "any")


def _object(schema: Mapping[str, Any], indent: str) -> str:
    required, lines = schema.get("required", ()), list[str]()
    for name, item in schema.get("properties", {}).items():
        comment = _comment(item.get("description", ""), indent) if isinstance(item, Mapping) else ""
        optional = "" if name in required else "?"
        default = f" // default: {json.dumps(item['default'], ensure_ascii=False)}" if "default" in item else ""
        lines.append(f"{comment}{indent}{name}{optional}: {_type(item, indent + '    ')},{default}\n")
    return f"{{\n{''.join(lines)}{indent}}}"


def _comment(text: str, indent: str) -> str:
    return "".join(f"{indent}// {line}\n" for line in text.splitlines())
