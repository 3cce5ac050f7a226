"""Rendering and parsing a turn: the time beside the tokenizer's own, at conversations of different lengths.

    python bench/chat.py

A turn is what an episode does between two samples: parse the sampled ids with one tool call, render the join with the
tool's result. The history is ids that neither touches, so its length must not show. "Own" is the time less that of the
tokenizer's `encode` and `decode` in the same loop, both in CPU time of the thread. The bar: own time under 0.3 ms a turn
at 32k tokens, and no growth with the history.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import agentrt
from agentrt.core.tokenizer import Tokenizer
from agentrt.core.tokens import Tokens
from agentrt.env.chat.chatml import ChatML
from agentrt.env.chat.derived import Derived
from agentrt.env.chat.message import Message, ToolCall
from agentrt.env.chat.qwen import Qwen3
from agentrt.env.chat.renderer import Family
from agentrt.env.chat.template import Template

LENGTHS = (512, 4_096, 32_768)
ROUNDS, TURNS = 9, 200
BAR_SECONDS = 0.3e-3

CALL = Message("assistant", "I add the numbers.", calls=(ToolCall("add", {"a": 2, "b": 3}),))
RESULT = [Message("tool", "The sum is 5. " * 20, name="add")]

TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class Timed(Tokenizer):
    """A tokenizer that adds up its own time."""

    seconds = 0.0

    def encode(self, text: str) -> list[int]:
        started = time.thread_time()
        ids = super().encode(text)
        self.seconds += time.thread_time() - started
        return ids

    def decode(self, token_ids: object) -> str:
        started = time.thread_time()
        text = super().decode(token_ids)  # type: ignore[arg-type]
        self.seconds += time.thread_time() - started
        return text


def own_seconds(renderer: Family, tokenizer: Timed, length: int) -> tuple[float, float]:
    """The renderer's own time and the tokenizer's for a turn at a history of `length` ids; medians over rounds."""
    sampled = renderer.turn(CALL)
    own, tokenizing = [], []
    for _ in range(ROUNDS):
        tokens = Tokens()
        tokens.observe([1] * length)
        tokenizer.seconds, started = 0.0, time.thread_time()
        for _ in range(TURNS):
            turn = renderer.parse(sampled, "stop")
            joining = renderer.join(RESULT, ended=True)
            assert turn.calls == CALL.calls and joining  # noqa: PT018
        spent = time.thread_time() - started
        own.append((spent - tokenizer.seconds) / TURNS)
        tokenizing.append(tokenizer.seconds / TURNS)
        tokens.observe(joining)
    return statistics.median(own), statistics.median(tokenizing)


def main() -> int:
    definition = (Path(agentrt.__file__).parent / "models" / "sprout" / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = Timed(definition)
    makers: dict[str, Callable[[], Family]] = {
        "chatml": lambda: ChatML(tokenizer),
        "qwen3": lambda: Qwen3(tokenizer),
        "derived": lambda: Derived(Template(TEMPLATE, tokenizer)),
    }
    worst = 0.0
    print(f"{'renderer':<10} {'history':>8} {'own ms':>8} {'tokenizer ms':>13}")
    for name, make in makers.items():
        renderer = make()
        for length in LENGTHS:
            own, tokenizing = own_seconds(renderer, tokenizer, length)
            worst = max(worst, own)
            print(f"{name:<10} {length:>8} {own * 1e3:>8.3f} {tokenizing * 1e3:>13.3f}")
    print(f"worst {worst * 1e3:.3f} ms, bar {BAR_SECONDS * 1e3:.1f} ms")
    return 0 if worst < BAR_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
