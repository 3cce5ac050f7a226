"""The hand-written families beside their oracles, and random conversations that each of them can say."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import oracles
import tokenizers
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.deepseek import DeepSeekV3
from agentrt.env.chat.gemma import Gemma3
from agentrt.env.chat.glm import Glm45
from agentrt.env.chat.llama import Llama3
from agentrt.env.chat.message import Message, ToolCall
from agentrt.env.chat.qwen import Qwen3, Qwen25, QwenCoder, SmolLM2
from agentrt.env.chat.renderer import Family, described
from agentrt.env.chat.template import plain_message

MORE_CONTROLS = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|observation|>", "/nothink", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>"),
    *(
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁outputs▁begin｜>",
    ),
    *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"),
)
"""Added to Qwen's vocabulary, so that one vocabulary can say every family's format."""

BEGINNINGS = {"llama": "<|begin_of_text|>", "gemma3": "<bos>", "deepseekv3": "<｜begin▁of▁sentence｜>"}
"""`bos_token` of the templates that ask for it."""


class Described(NamedTuple):
    """A tool as a renderer is told of it."""

    name: str
    description: str
    parameters: dict[str, Any]


ADD = Described(
    "add", "Adds <two> numbers.",
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
)  # fmt: skip


class Case(NamedTuple):
    """A family, the template that it must agree with, and what conversations the template admits."""

    name: str
    make: Callable[[Tokenizer], Family]
    template: str
    variables: dict[str, Any] = {}
    tools: bool = True
    """It lists tools."""
    calls: int = 2
    """How many calls a turn may have."""
    said_with_calls: bool = True
    """A turn with calls may have content."""
    reasoning: tuple[str, ...] = ("never",)
    """When a turn has reasoning."""
    text_arguments: bool = False
    trims: bool = False
    """Contents are stripped, and so are reasoning texts."""
    branches_alike: bool = True
    """A new branch is written as the template writes it. DeepSeek's leaves out markers; we do not."""


CASES = (
    Case("qwen2.5", Qwen25, "qwen2_5"),
    Case("qwen3", Qwen3, "qwen3", reasoning=("never", "always")),
    Case("qwen3-nothink", lambda tokenizer: Qwen3(tokenizer, enable_thinking=False), "qwen3", {"enable_thinking": False}),
    Case("qwen3-2507", Qwen3, "qwen3_instruct_2507"),
    Case("qwen-coder", QwenCoder, "qwen3_6", reasoning=("always",), trims=True),
    Case("smollm2", SmolLM2, "smollm2", tools=False, calls=0),
    Case("llama3.1", Llama3, "llama3_1", calls=1, said_with_calls=False),
    Case("llama3.2", lambda it: Llama3(it, date="01 Feb 2025"), "llama3_2", {"date_string": "01 Feb 2025"}, calls=1,
         said_with_calls=False),
    Case("llama3.1-system", lambda it: Llama3(it, tools_in_user_message=False), "llama3_1",
         {"tools_in_user_message": False}, calls=1, said_with_calls=False),
    Case("gemma3", Gemma3, "gemma3", tools=False, calls=0, trims=True),
    Case("deepseek-v3", lambda it: DeepSeekV3(it), "deepseekv3-chat", tools=False, text_arguments=True,
         branches_alike=False),
    Case("deepseek-r1", lambda it: DeepSeekV3(it, enable_thinking=True), "deepseekv3", tools=False, reasoning=("always",),
         text_arguments=True, branches_alike=False),
    Case("glm-4.5", Glm45, "glm4moe", reasoning=("never", "always"), trims=True),
)  # fmt: skip


@cache
def definition() -> str:
    """Qwen's vocabulary with the control tokens of all families."""
    data = json.loads(oracles.definition("qwen"))
    (flags,) = [token for token in data["added_tokens"] if token["id"] == 151643]
    data["added_tokens"] += [
        {**flags, "id": 151669 + index, "content": text} for index, text in enumerate(MORE_CONTROLS)
    ]  # fmt: skip
    return json.dumps(data)


@cache
def vocabulary() -> Tokenizer:
    """The same as the renderers use it."""
    return Tokenizer(definition())


@cache
def _whole() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(definition())


def source(name: str) -> str:
    """A template by its name in a `Case`."""
    if name == "smollm2":
        return str(oracles.smollm2_fields()["tokenizer.chat_template"])
    if name == "deepseekv3-chat":  # the one of V3 differs from that of R1, which TRL keeps, in the generation prompt
        return oracles.template("deepseekv3").replace("<｜Assistant｜><think>\\n", "<｜Assistant｜>")
    return oracles.template(name)


def rendered(
    case: Case, messages: Sequence[Message], tools: Sequence[Described] = (), *, generate: bool = True
) -> list[int]:
    """The ids of a whole conversation: rendered by transformers, encoded by the tokenizers library."""
    plain = [plain_message(message, arguments_as_text=case.text_arguments) for message in messages]
    begin = next((token for key, token in BEGINNINGS.items() if case.template.startswith(key)), "")
    (text,), _ = render_jinja_template(
        [plain], [described(tool) for tool in tools] or None, chat_template=source(case.template),
        add_generation_prompt=generate, bos_token=begin, **case.variables,
    )  # fmt: skip
    return list(_whole().encode(text, add_special_tokens=False).ids)


# --- random conversations -----------------------------------------------------------------------------------------------

_chars = st.sampled_from([*"ab5 .,é世🪿\n\t{}\"'\\%:", "the ", "\n\n", "  ", "</", "import"])
heard_text = st.lists(_chars, max_size=8).map("".join)
said_text = heard_text.map(lambda text: "So" + text + ".")
"""What a turn says neither starts nor ends with white space: where template and turn meet, the policy decides."""


@st.composite
def conversations(draw: st.DrawFn, case: Case) -> tuple[list[Message], list[tuple[Message, list[Message]]]]:
    """An opening, and turns with what is said to each."""
    content = said_text if case.trims else heard_text
    opening = [Message("system", draw(said_text))] if draw(st.booleans()) else []
    opening.append(Message("user", draw(content)))
    exchanges = []
    for _ in range(draw(st.integers(1, 4))):
        arguments = st.dictionaries(st.sampled_from(["a", "b", "cé"]), st.one_of(said_text, st.integers()), min_size=1)
        made = draw(st.lists(st.builds(ToolCall, st.just("add"), arguments), max_size=case.calls))
        said = "" if made and (not case.said_with_calls or draw(st.booleans())) else draw(said_text)
        thought = draw(said_text) if draw(st.sampled_from(case.reasoning)) == "always" else ""
        answers = [Message("tool", draw(content), name="add") for _ in made] or [Message("user", draw(content))]
        exchanges.append((Message("assistant", said, calls=tuple(made), reasoning=thought), answers))
    return opening, exchanges
