"""The renderer of a model folder, and the report on it."""

import json
from pathlib import Path

import oracles
import pytest
from families import source as template_source
from families import vocabulary

import agentrt
from agentrt.core.errors import UsageError
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.branch import divergence, rewrites
from agentrt.env.chat.chatml import ChatML
from agentrt.env.chat.choose import chat_template, renderer_for
from agentrt.env.chat.explain import explain
from agentrt.env.chat.message import Message
from agentrt.env.chat.qwen import Qwen3
from agentrt.env.chat.sprout import Sprout
from agentrt.env.chat.template import Template
from agentrt.env.tool import tool

SPROUT = Path(agentrt.__file__).parent / "models" / "sprout"


def sprout(without: str = "no such token") -> Tokenizer:
    """The tokenizer of the shipped model, without the control tokens that hold a text."""
    definition = json.loads((SPROUT / "tokenizer.json").read_text(encoding="utf-8"))
    definition["added_tokens"] = [token for token in definition["added_tokens"] if without not in token["content"]]
    return Tokenizer(json.dumps(definition))


def test_without_a_template_control_tokens_decide(tmp_path: Path) -> None:
    assert type(renderer_for(tmp_path, sprout(without="sprout"))) is ChatML
    assert type(renderer_for(SPROUT, sprout())) is Sprout


def test_a_model_that_does_not_chat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no chat template .* use a chat model"):
        renderer_for(tmp_path, sprout(without="<|"))


def test_sprout_writes_no_tool_list() -> None:
    renderer = renderer_for(SPROUT, sprout())
    messages = [Message("system", "Be brief."), Message("user", "Hi")]
    assert renderer.prompt(messages, [tool("calculator")]) == renderer.prompt(messages)


@pytest.mark.parametrize("where", ["config", "file", "named"])
def test_the_folder_s_template_decides(where: str, tmp_path: Path) -> None:
    source = oracles.template("qwen3")
    config = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>", "model_max_length": 10**30}
    match where:
        case "file":
            (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
        case "config":
            config["chat_template"] = source  # type: ignore[assignment]
        case "named":
            named = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": source}]
            config["chat_template"] = named  # type: ignore[assignment]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert chat_template(tmp_path) == (source, {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"})
    assert type(renderer_for(tmp_path, vocabulary())) is Qwen3


@pytest.mark.parametrize(
    "config", ["{", "[]", '{"chat_template": 3}', '{"chat_template": [{"name": "a"}]}', '{"bos_token": {}}', "\xff"]
)
def test_a_damaged_config_is_one_sentence(config: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(config.encode("latin-1"))
    with pytest.raises(UsageError, match=r"tokenizer_config.json: "):
        chat_template(tmp_path)


def test_a_damaged_template_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"chat_template.jinja: 'utf-8' codec"):
        chat_template(tmp_path)


@pytest.mark.parametrize("definition", ["{", "[]", "{}", '{"model": {"type": "BPE"}}', "\xff"])
def test_a_damaged_tokenizer_is_one_sentence(definition: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(definition.encode("latin-1"))
    with pytest.raises(UsageError, match=r"tokenizer.json: no tokenizer in the format of Hugging Face: "):
        Tokenizer.load(tmp_path)


def test_explain_shows_joins_rules_and_masks() -> None:
    text = explain(Qwen3(vocabulary()), Template(template_source("qwen3"), vocabulary()))
    assert "renderer   Qwen3\ncalls      hermes\nreasoning  <think>…</think>\n" in text
    assert "turn ends  '<|im_end|>' (151645)\n" in text
    assert (
        "  a tool result  [198, 151644, 872, 198, 151665, 198, 20, 198, 151666, 151645, 198, 151644, 77091, 198]"
        in text
    )
    assert "  tool results                                 yes\n" in text
    assert "with reasoning    no: the template drops the reasoning of turns before the last user message;" in text
    assert (
        '«<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>»\n<|im_start|>user'
        in text
    )
    assert "\x1b[32m" in explain(Qwen3(vocabulary()), colour=True)


def test_why_a_conversation_cannot_go_on_by_appending() -> None:
    question, turn = Message("user", "2+2?"), Message("assistant", "4", reasoning="Add.")
    more = Message("user", "And 3+3?")
    assert divergence([question, turn], [question, turn, more]) == ""
    changed = [question, Message("assistant", "4")]
    assert divergence([question, turn], changed) == "message 1 (assistant) has another reasoning"
    assert divergence([question, turn], [question]) == "1 messages at the end were left out"
    dropped = "the template drops the reasoning of turns before the last user message"
    assert rewrites(ChatML(sprout()), [question, turn], [question, turn, more]) == dropped
    assert rewrites(ChatML(sprout()), [question, turn], [question, turn, Message("tool", "5")]) == ""
