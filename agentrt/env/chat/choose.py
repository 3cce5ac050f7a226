"""`renderer_for`: the renderer of a model folder.

The folder's own chat template is the judge: a hand-written family is used if it writes every probe conversation as the
template does; any other template gets a renderer derived from it. A folder without a template gets the family
that its control tokens name.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from agentrt.core.errors import UsageError
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat import proof, sprout
from agentrt.env.chat.chatml import ChatML
from agentrt.env.chat.deepseek import DeepSeekV3
from agentrt.env.chat.derived import Derived
from agentrt.env.chat.gemma import Gemma3
from agentrt.env.chat.glm import Glm45
from agentrt.env.chat.harmony import Harmony
from agentrt.env.chat.llama import Llama3
from agentrt.env.chat.mistral import Mistral
from agentrt.env.chat.qwen import Hermes, Qwen3, Qwen25, QwenCoder, SmolLM2
from agentrt.env.chat.renderer import Family
from agentrt.env.chat.template import Template

FAMILIES: tuple[Callable[[Tokenizer], Family], ...] = (
    Qwen3, Qwen25, QwenCoder, SmolLM2, Hermes, ChatML, Llama3, Harmony, Glm45, DeepSeekV3,
    partial(DeepSeekV3, enable_thinking=True), Gemma3, Mistral,
)  # fmt: skip
"""Every family, in the order in which a template is compared with them."""

BY_CONTROLS: tuple[tuple[str, Callable[[Tokenizer], Family]], ...] = (
    (sprout.MARK, sprout.Sprout),
    ("<|im_start|>", ChatML),
    ("<|start_header_id|>", Llama3),
    ("<|channel|>", Harmony),
    ("[gMASK]", Glm45),
    ("<｜User｜>", DeepSeekV3),
    ("<start_of_turn>", Gemma3),
    ("[INST]", Mistral),
)
"""What a control token says of a model that has no template."""


def renderer_for(folder: Path, tokenizer: Tokenizer) -> Family:
    """The renderer of the model in `folder`. `UsageError` if neither template nor control tokens say how it chats."""
    source, variables = chat_template(folder)
    if source is not None:
        return renderer_of(Template(source, tokenizer, variables=variables))
    for marker, family in BY_CONTROLS:
        if marker in tokenizer.special:
            return family(tokenizer)
    raise UsageError(f"{folder} has no chat template and its tokenizer no known control tokens; use a chat model")


def renderer_of(template: Template) -> Family:
    """The family that writes what the template writes, or the renderer derived from it."""
    for family in _possible(template.tokenizer):
        if agrees(family, template):
            return family
    return Derived(template)


def agrees(family: Family, template: Template) -> bool:
    """True if the family writes all probes that the template admits as it does, or names the rule where it cannot.

    A template that lists no tools has no say in how calls are written.
    """
    with_calls = proof.lists_tools(template)
    findings = [
        finding
        for finding in proof.prove(family, template)
        if (with_calls or not finding.kind.calls) and not _refused_by(template, finding)
    ]
    return bool(findings) and all(
        finding.opens_alike and (finding.verdict == "same" or finding.is_known) for finding in findings
    )


def _refused_by(template: Template, finding: proof.Finding) -> bool:
    return finding.verdict == "refused" and not proof.admits(template, finding.kind)


class _Token(msgspec.Struct):
    content: str


class _Named(msgspec.Struct):
    name: str
    template: str


class _Config(msgspec.Struct):
    """The keys of `tokenizer_config.json` that are read."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    chat_template: str | list[_Named] | None = None


def chat_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The template's source, None without one, and the special tokens that it may name. `UsageError` for damaged files."""
    path, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config) if path.is_file() else _Config()
        source = own.read_text(encoding="utf-8") if own.is_file() else None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: {error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{own}: {error}") from error
    named = {"bos_token": config.bos_token, "eos_token": config.eos_token, "pad_token": config.pad_token}
    tokens = {name: token if isinstance(token, str) else token.content for name, token in named.items() if token}
    found = config.chat_template if source is None else source
    if isinstance(found, list):  # several by name; tools are in the one for them, if there is one
        by_name = {item.name: item.template for item in found}
        found = by_name.get("tool_use") or by_name.get("default")
    return found, tokens


def _possible(tokenizer: Tokenizer) -> Iterator[Family]:
    for family in FAMILIES:
        try:
            yield family(tokenizer)
        except UsageError:
            continue
