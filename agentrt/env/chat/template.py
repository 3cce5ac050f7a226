"""A model's own Jinja chat template, rendered so that no text of a message can become a control token.

The environment is the one that templates are written for (that of Hugging Face `transformers`): sandboxed, `tojson`
that keeps every character, `raise_exception`, `strftime_now`. Before rendering, one character of every control token
(its first that is no letter) is replaced in all contents by a private one that no content has; after the text was split
at the control tokens it is put back. So contents are encoded together with the template text beside them, and as text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrt.core.errors import UsageError
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.message import ROLES, Message, ToolCall
from agentrt.env.chat.pieces import Pieces
from agentrt.env.chat.renderer import ToolDescription, described

_PRIVATE = range(0xF0000, 0xFFFFD)
"""Code points that no text means anything by."""
TODAY = datetime(2024, 7, 26)
"""For templates that ask: a fixed day keeps prompts the same from day to day."""


REFUSALS = (
    TemplateError, TypeError, AttributeError, LookupError, ValueError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip
"""What a template raises that does not fit a conversation, or is wrong in itself."""


class Template:
    """A compiled chat template over one vocabulary.

    `variables` are what it is given besides messages and tools (`enable_thinking`, `date_string`, ...).
    """

    def __init__(self, source: str, tokenizer: Tokenizer, *, variables: Mapping[str, Any] | None = None) -> None:
        self.source, self.tokenizer, self.variables = source, tokenizer, dict(variables or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = TODAY.strftime
        try:
            self._compiled = environment.from_string(source)
        except REFUSALS as error:
            raise UsageError(f"the chat template is not valid Jinja: {error}") from error
        markers = sorted((marker for marker in tokenizer.special if marker.strip()), key=len, reverse=True)
        self.markers = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        """Finds the control tokens in a rendered text."""
        self._chars = sorted({next((char for char in marker if not char.isalnum()), marker[0]) for marker in markers})

    def text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, generate: bool = True
    ) -> str:
        """What the template makes of plain messages, contents unprotected. `UsageError` for what it refuses."""
        try:
            return self._compiled.render(
                messages=list(messages), tools=list(tools) or None, documents=None, add_generation_prompt=generate,
                **self.variables,
            )  # fmt: skip
        except SecurityError as error:
            raise UsageError(f"the chat template does what a template may not: {error}") from error
        except REFUSALS as error:
            raise UsageError(f"the chat template refuses the conversation: {error}") from error

    def protected(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> "Protected":
        """The same in a form that can be rendered and then split at control tokens."""
        return Protected(messages, tools, self._chars)

    def encode(self, text: str, protected: "Protected") -> list[int]:
        """The ids of a text rendered from `protected`: the template's control tokens as such, all else as text."""
        pieces, at = Pieces(self.tokenizer), 0
        for marker in self.markers.finditer(text):
            pieces.text(protected.plain(text[at : marker.start()]))
            pieces.control(marker.group())
            at = marker.end()
        pieces.text(protected.plain(text[at:]))
        return pieces.ids()


class Protected:
    """Messages and tools whose strings cannot spell a control token, and the way back."""

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], chars: Iterable[str]
    ) -> None:
        text = "".join(_strings([*messages, *tools]))
        free = (chr(code) for code in _PRIVATE if chr(code) not in text)
        there = {char: next(free) for char in chars if char in text}
        self._back = str.maketrans({private: char for char, private in there.items()})
        table = str.maketrans(there)
        self.messages: list[Any] = [_mapped(message, table) for message in messages]
        self.tools: list[Any] = [_mapped(tool, table) for tool in tools]

    def plain(self, text: str) -> str:
        """The text with the contents' own characters."""
        return text.translate(self._back) if self._back else text


def plain_message(message: Message, *, arguments_as_text: bool = False) -> dict[str, Any]:
    """A message as templates know it. Reasoning is given under all names that templates use for it."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        plain |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning, "thinking": message.reasoning}
    if message.role == "tool":
        plain |= {"name": message.name, "tool_call_id": message.call_id}
    if message.calls:
        plain["tool_calls"] = [
            {
                "type": "function", "id": call.id,
                "function": {"name": call.name, "arguments": _arguments(call) if arguments_as_text else call.arguments},
            }
            for call in message.calls
        ]  # fmt: skip
    return plain


def _arguments(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def plain_tools(tools: Sequence[ToolDescription]) -> list[dict[str, Any]]:
    """Tools as templates know them."""
    return [described(tool) for tool in tools]


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text in templates for training; it writes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strings(value: Any) -> list[str]:
    """Every string in a value of JSON's types, keys too."""
    found, pending = list[str](), [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            pending += (*item.keys(), *item.values())
        elif isinstance(item, (list, tuple)):
            pending += item
    return found


_STRUCTURE = {
    "role": frozenset(ROLES),
    "type": frozenset(("function", "object", "array", "string", "number", "integer", "boolean", "null")),
}
"""By key, words that templates compare with their own. Any other value of these keys is content: arguments have them too."""


def _mapped(value: Any, table: Mapping[int, str]) -> Any:
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, dict):
        return {
            key.translate(table): item
            if isinstance(item, str) and item in _STRUCTURE.get(key, ())
            else _mapped(item, table)
            for key, item in value.items()
        }
    return [_mapped(item, table) for item in value] if isinstance(value, (list, tuple)) else value
