"""When a conversation cannot go on by appending: the reasons for a new branch."""

from collections.abc import Sequence

from agentrt.env.chat.message import Message
from agentrt.env.chat.renderer import Renderer, ToolDescription


def divergence(history: Sequence[Message], wanted: Sequence[Message]) -> str:
    """Why `wanted` does not continue `history`: the first message that was changed, moved or left out; empty if it does.

    For environments and clients that hand over whole conversations. A branch that diverges starts with its own prompt
    and mask; the prefix cache still shares the KV of what is equal.
    """
    for index, (before, now) in enumerate(zip(history, wanted, strict=False)):
        changed = [name for name in before.__struct_fields__ if getattr(before, name) != getattr(now, name)]
        if changed:
            return f"message {index} ({before.role}) has another {' and '.join(changed)}"
    if len(wanted) < len(history):
        return f"{len(history) - len(wanted)} messages at the end were left out"
    return ""


def rewrites(
    renderer: Renderer, history: Sequence[Message], wanted: Sequence[Message], tools: Sequence[ToolDescription] = ()
) -> str:
    """Why the ids of `history` cannot stay if `wanted` is to be what the model's template renders; empty if they can.

    Two reasons exist: the caller changed the history, or a rule of the template does. Who appends ignores the second
    one.
    """
    return divergence(history, wanted) or renderer.rewrites(history, wanted[len(history) :], tools)
