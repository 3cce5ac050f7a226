"""A task: what an episode starts from."""

from typing import Any

import msgspec

from agentrt.env.chat.message import Message
from agentrt.sandbox.files import check


class Task(msgspec.Struct, frozen=True):
    """One data item. `id` is unique in its split and stable: resume and seeds go by it."""

    id: str
    messages: tuple[Message, ...]
    """The prompt."""
    data: dict[str, Any] = {}
    """What the rewards need and the model never sees."""
    files: dict[str, str] = {}
    """Texts by path, put into the episode's folder before its first turn, where its tools work."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str):
            raise TypeError(f"Task.id must be a string, not the {type(self.id).__name__} {self.id!r}")
        self.id.encode()  # half a character is in no record
        if not isinstance(self.messages, (tuple, list)):  # an iterator would be empty for the second of a group
            raise TypeError(f"Task.messages must be a tuple, not a {type(self.messages).__name__}")
        try:
            check(self.files)
        except ValueError as error:
            raise ValueError(f"Task.files: {error}") from None
