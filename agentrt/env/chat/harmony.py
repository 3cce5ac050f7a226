"""The format of gpt-oss (Harmony): a turn is several messages, each with a channel.

Analysis is the reasoning, final the content, commentary to `functions.NAME` a call. A turn ends with `<|return|>` after
its final message or `<|call|>` after a call; `<|end|>` only ends a message inside it.
"""

import json
import re
from collections.abc import Sequence

from agentrt.core.protocol import FinishReason
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat import typescript
from agentrt.env.chat.calls.exact import read_arguments, skip_space
from agentrt.env.chat.calls.format import NONE, Schemas
from agentrt.env.chat.message import Message, ToolCall, Turn
from agentrt.env.chat.pieces import Pieces
from agentrt.env.chat.renderer import Family, Shown, ToolDescription, settled

START, MESSAGE, CHANNEL, CONSTRAIN = "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


HARMONY = NONE._replace(name="harmony")
"""Calls are messages of their own here, so `read` finds them, not a format."""


class Harmony(Family):
    """`effort` is the reasoning effort; with a `date` (YYYY-MM-DD) the system message states it."""

    ends = (RETURN, CALL)
    cut_end = END
    controls = (START, MESSAGE, CHANNEL, END)
    calls = HARMONY

    def __init__(self, tokenizer: Tokenizer, *, effort: str = "medium", date: str = "") -> None:
        super().__init__(tokenizer)
        self.effort, self.date = effort, date

    def rewrites(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolDescription] = ()
    ) -> str:
        """See `Renderer.rewrites`."""
        if any(message.role == "assistant" and not message.calls for message in history):
            return "the format drops analysis before a final message, and writes <|end|> for its <|return|>"
        return ""

    def read(self, text: str, finish_reason: FinishReason, schemas: Schemas) -> Turn:
        """See `Family.read`."""
        return read(text, finish_reason)

    def visible(self, text: str) -> Shown:
        """See `Renderer.visible`."""
        return visible(text)

    def _open(self, pieces: Pieces, messages: Sequence[Message], tools: Sequence[ToolDescription]) -> Sequence[Message]:
        instructions = ""
        if messages and messages[0].role == "system":
            instructions, messages = messages[0].content, messages[1:]
        _write_message(pieces, "system", self._system_text(bool(tools)))
        parts = [f"# Instructions\n\n{instructions}"] if instructions else []
        if tools:
            parts.append("# Tools\n\n" + typescript.namespace("functions", tools))
        if parts:
            _write_message(pieces, "developer", "\n\n".join(parts))
        return messages

    def _system_text(self, has_tools: bool) -> str:
        text = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
        text += f"Current date: {self.date}\n" if self.date else ""
        text += f"\nReasoning: {self.effort}\n\n# Valid channels: analysis, commentary, final. "
        text += "Channel must be included for every message."
        return text + ("\nCalls to these tools must go to the commentary channel: 'functions'." if has_tools else "")

    def _write(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        """Analysis before a final message is left out, as the format wants it."""
        finals = [index for index, message in enumerate(messages) if message.role == "assistant" and not message.calls]
        for index, message in enumerate(messages):
            match message.role:
                case "assistant":
                    pieces.control(START)
                    pieces.text("assistant")
                    self._write_said(pieces, message, message.reasoning if index > max(finals, default=-1) else "", END)
                case "tool":
                    pieces.control(START)
                    pieces.text(f"functions.{message.name} to=assistant")
                    pieces.control(CHANNEL)
                    pieces.text("commentary")
                    _write_body(pieces, message.content, END)
                case "system":
                    _write_message(pieces, "developer", message.content)
                case "user":
                    _write_message(pieces, "user", message.content)

    def _start_turn(self, pieces: Pieces, messages: Sequence[Message]) -> None:
        pieces.control(START)
        pieces.text("assistant")

    def _write_turn(self, pieces: Pieces, message: Message) -> None:
        self._write_said(pieces, message, message.reasoning, RETURN)

    def _write_said(self, pieces: Pieces, message: Message, thought: str, end: str) -> None:
        """The messages of a turn, after `<|start|>assistant`; `end` is that of a final message."""
        parts = [("analysis", thought)] if thought else []
        if message.content or not message.calls:
            parts.append(("commentary" if message.calls else "final", message.content))
        for index, (channel, text) in enumerate(parts):
            self._start_again(pieces, index)
            pieces.control(CHANNEL)
            pieces.text(channel)
            _write_body(pieces, text, end if channel == "final" else END)
        for index, call in enumerate(message.calls):
            self._start_again(pieces, len(parts) + index)
            pieces.text(f" to=functions.{call.name}")
            pieces.control(CHANNEL)
            pieces.text("commentary ")
            pieces.control(CONSTRAIN)
            pieces.text("json")
            _write_body(pieces, json.dumps(call.arguments, ensure_ascii=False), CALL)

    def _start_again(self, pieces: Pieces, index: int) -> None:
        if index:
            pieces.control(START)
            pieces.text("assistant")


def read(text: str, finish_reason: FinishReason) -> Turn:
    """A turn's text, which follows `<|start|>assistant`, by channel; see `Renderer.parse`."""
    thoughts, contents, calls = list[str](), list[str](), list[ToolCall]()
    for part in text.split(START):
        header, has_body, body = part.partition(MESSAGE)
        body = body.removesuffix(END)
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if not has_body:
            contents.append("" if CHANNEL in header else header.removeprefix("assistant"))
        elif recipient is not None:
            calls.append(_call(recipient[1], body))
        elif channel is not None and channel[1] == "analysis":
            thoughts.append(body)
        else:
            contents.append(body)
    return Turn(
        reasoning="\n".join(filter(None, thoughts)), content="\n".join(filter(None, contents)),
        calls=tuple(calls) if finish_reason == "stop" else (), finish_reason=finish_reason,
    )  # fmt: skip


def visible(text: str) -> Shown:
    """See `Renderer.visible`."""
    whole = text[: settled(text, (START, END, RETURN, CALL))]
    rest = text[len(whole) :]
    while rest.startswith(END + START):
        following = rest[len(END + START) :]
        end = settled(following, (START, END, RETURN, CALL))
        whole, rest = f"{whole}{END}{START}{following[:end]}", following[end:]
    is_body = MESSAGE in whole.rpartition(START)[2]
    turn = read(whole if is_body else whole.rpartition(END + START)[0], "length")
    return Shown(turn.reasoning, turn.content)


def _write_message(pieces: Pieces, role: str, text: str) -> None:
    pieces.control(START)
    pieces.text(role)
    _write_body(pieces, text, END)


def _write_body(pieces: Pieces, text: str, end: str) -> None:
    pieces.control(MESSAGE)
    pieces.text(text)
    pieces.control(end)


def _call(recipient: str, body: str) -> ToolCall:
    """The call that a message to a tool is; its body is all arguments."""
    name, start = recipient.removeprefix("functions."), skip_space(body, 0)
    call, end = read_arguments(body, start, None, name)
    if not call.error and skip_space(body, end) < len(body):
        return ToolCall(name, error=f"the arguments are not valid JSON: Extra data at character {end - start}")
    return call
