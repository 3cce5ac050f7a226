"""Reasoning is what a `<think>` block at the start of a turn holds."""

import pytest

from agentrt.env.chat.reasoning import Parts, split


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("4", Parts("", "4", True)),
        ("<think>\nAdd.\n</think>\n\n4", Parts("Add.", "4", True)),
        ("\n<think></think>4", Parts("", "4", True)),
        ("<think>a</think>b</think>c", Parts("a", "b</think>c", True)),
        ("<think>Add", Parts("Add", "", False)),
        ("4 <think>Add</think>", Parts("", "4 <think>Add</think>", True)),
    ],
)
def test_split(text: str, parts: Parts) -> None:
    assert split(text) == parts
