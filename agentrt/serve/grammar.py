"""`CallGrammars`: what a turn may say that has to be tool calls, by the JSON schemas of the tools. By llguidance.

Only for calls in Hermes style, which are JSON between markers, as in training: no other white space, names before arguments.
Reasoning may come before the first call, where the format has it. The law is that of the request with all else masked.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.calls.hermes import CLOSE, HERMES, OPEN
from agentrt.env.chat.reasoning import Markers
from agentrt.env.chat.renderer import Family
from agentrt.serve.messages import FunctionTool
from agentrt.serve.requests import BadRequest

Mask = Callable[[Sequence[int]], NDArray[np.bool_]]
"""As `agentrt.core.protocol.Grammar`."""


class CallGrammars:
    """For the calls of one renderer, over the first `vocab_size` ids. Borrows the renderer."""

    def __init__(self, renderer: Family, vocab_size: int) -> None:
        self._renderer, self._vocab_size = renderer, vocab_size

    def of(self, tools: Sequence[FunctionTool], *, several: bool) -> Mask:
        """One or, with `several`, more calls of `tools`, then an end id. For one turn: it remembers how far that is.

        `BadRequest` for a format without a grammar, and for schemas that cannot be one. Takes milliseconds, and the first
        time a second; so not in an event loop.
        """
        if self._renderer.calls is not HERMES:
            raise BadRequest(
                f"tool_choice: this model writes calls as {self._renderer.calls.name}, and only {HERMES.name} can be forced; "
                "use 'auto'",
                param="tool_choice",
            )
        thinking = self._renderer.thinking
        grammar = LLMatcher.grammar_from_lark(_lark(tools, thinking, self._renderer.thinks_at_once, several=several))
        if wrong := LLMatcher.validate_grammar(grammar, self._tokenizer):
            raise BadRequest(f"tools: no grammar can be made of the schemas: {wrong.splitlines()[0]}", param="tools")
        return _Walk(LLMatcher(self._tokenizer, grammar, log_level=0), self._renderer.stop_token_ids, self._vocab_size)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        words = _Words(self._renderer.tokenizer, self._renderer.stop_token_ids, self._vocab_size)
        return LLTokenizer(TokenizerWrapper(words), eos_token=list(self._renderer.stop_token_ids))


class _Words:
    """A vocabulary as llguidance asks for it. Markers of calls and reasoning are text; other control tokens never come."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, end_ids[0]
        self.tokens = [tokenizer.bytes_of(token_id) for token_id in range(vocab_size)]
        text = (OPEN, CLOSE, "<think>", "</think>")
        self.special_token_ids = [token_id for name, token_id in tokenizer.special.items() if name not in text]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace"))


class _Walk:
    """A grammar along one turn. Asked of another beginning than the last one's, it starts anew."""

    def __init__(self, matcher: LLMatcher, end_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher, self._end_ids, self._vocab_size = matcher, list(end_ids), vocab_size
        self._at: list[int] = []

    def __call__(self, sampled: Sequence[int]) -> NDArray[np.bool_]:
        ids, known = list(sampled), len(self._at)
        if ids[:known] != self._at:
            self._matcher.reset()
            known = 0
        if not self._matcher.consume_tokens(ids[known:]):
            raise ValueError(f"the ids leave the grammar: {self._matcher.get_error()}")
        self._at = ids
        if self._matcher.is_stopped():
            mask_V = np.zeros(self._vocab_size, dtype=np.bool_)
            mask_V[self._end_ids] = True
            return mask_V
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)


def _lark(tools: Sequence[FunctionTool], thinking: Markers | None, thinks_at_once: bool, *, several: bool) -> str:
    lines = [
        "start: thought calls" if thinks_at_once else "start: opened? calls",
        'calls: call ("\\n" call)*' if several else "calls: call",
        f"call: {_quoted(OPEN + chr(10))} body {_quoted(chr(10) + CLOSE)}",
        f"body: %json {msgspec.json.encode(_body(tools)).decode()}",
    ]
    if thinking is None:
        return "\n".join(lines).replace("opened? ", "")
    return "\n".join([
        *lines, f"opened: {_quoted(thinking.open)} thought",
        f'thought: thinking /\\n*/\nthinking[suffix={_quoted(thinking.close)}]: /(?s:.*)/',
    ])  # fmt: skip


def _body(tools: Sequence[FunctionTool]) -> dict[str, Any]:
    bodies = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": tool.parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    written = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {"x-guidance": written, "anyOf": bodies}


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
