"""Where a request goes on in a session: at the end of a branch, in the middle of one, or in a new one. Pure.

A client sends its whole conversation each time. What it repeats of a branch keeps the ids that were sampled; where it
leaves the branch, another one begins with the shared ids. What cannot be continued by appending (a changed message,
other tools) gets a prompt of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from agentrt.core.records import Rewrite
from agentrt.env.chat.branch import divergence
from agentrt.env.chat.message import Message
from agentrt.serve.messages import FunctionTool


class Mark(NamedTuple):
    """One turn of a branch."""

    messages: int
    """What had been said before it, in messages; its own is the next."""
    context: int
    """Ids before its first."""
    end: int
    """Ids after its last."""
    is_whole: bool
    """False for one that was cut off by its client or by a failure: it is recorded, and nothing follows it."""


class History(NamedTuple):
    """What the decision knows of a branch."""

    name: str
    tools: tuple[FunctionTool, ...]
    messages: Sequence[Message]
    """As the client saw them; the message of a turn that is not whole is not among them."""
    marks: Sequence[Mark]
    is_busy: bool
    """A turn of it is being sampled, so nothing is appended now."""


class Place(NamedTuple):
    """Where the turn goes: after the first `at` ids of `branch`, then `new` messages are rendered."""

    branch: str | None
    """None: a new branch with its own prompt."""
    at: int
    is_append: bool
    """`at` is the branch's end, so it goes on itself; else a new branch shares its first ids."""
    new: tuple[Message, ...]
    rewrite: Rewrite | None = None


def place(branches: Sequence[History], wanted: tuple[Message, ...], tools: tuple[FunctionTool, ...]) -> Place:
    """The place with the most ids that stay; of equal ones the end of a branch, so that it goes on itself."""
    found = [one for branch in branches if branch.tools == tools for one in _places(branch, wanted)]
    if found:
        return max(found, key=lambda one: (one.at, one.is_append))
    return Place(None, 0, is_append=False, new=wanted, rewrite=_rewrite(branches, wanted))


def as_sampled(history: Sequence[Message], wanted: Sequence[Message]) -> tuple[Message, ...]:
    """`wanted` with the reasoning of `history` where the client left it out: its absence is no change.

    `reasoning_content` is not among OpenAI's fields, so most clients do not send it back.
    """
    filled = [
        msgspec.structs.replace(now, reasoning=before.reasoning) if not now.reasoning else now
        for before, now in zip(history, wanted, strict=False)
    ]
    return (*filled, *wanted[len(filled) :])


def _places(branch: History, wanted: tuple[Message, ...]) -> list[Place]:
    wanted = as_sampled(branch.messages, wanted)
    places = []
    for index, mark in enumerate(branch.marks):
        before, after = branch.messages[: mark.messages], branch.messages[: mark.messages + 1]
        if divergence(before, wanted):
            break
        if len(wanted) == mark.messages:
            places.append(Place(branch.name, mark.context, is_append=False, new=()))
        elif mark.is_whole and len(wanted) > len(after) and not divergence(after, wanted):
            is_last = index == len(branch.marks) - 1 and not branch.is_busy
            places.append(Place(branch.name, mark.end, is_append=is_last, new=wanted[len(after) :]))
    return places


def _rewrite(branches: Sequence[History], wanted: tuple[Message, ...]) -> Rewrite | None:
    """The branch that a new one replaces, if it shares more than a system message with it."""
    shared = [(_in_common(branch.messages, wanted), index) for index, branch in enumerate(branches)]
    most, index = max(shared, default=(0, 0))
    if most == 0 or all(message.role == "system" for message in wanted[:most]):
        return None
    branch = branches[index]
    reason = divergence(branch.messages, as_sampled(branch.messages, wanted)) or "the client offers other tools"
    return Rewrite(branch.name, reason)


def _in_common(history: Sequence[Message], wanted: Sequence[Message]) -> int:
    pairs = enumerate(zip(history, as_sampled(history, wanted), strict=False))
    return next((index for index, (before, now) in pairs if before != now), min(len(history), len(wanted)))
