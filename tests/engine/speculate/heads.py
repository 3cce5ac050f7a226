"""Synthetic draft models for a tiny target: folders with the published tensor names and shapes, and random values."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentrt.core.spec import EngineSpec
from agentrt.engine.model.config import ModelConfig
from agentrt.engine.model.decoder import Decoder, expected_shapes
from agentrt.engine.model.loader import LoadedModel
from agentrt.engine.model.rope import Rope
from agentrt.engine.runner import ModelRunner
from agentrt.engine.speculate.drafter import Drafter
from agentrt.engine.speculate.gate import OpenGate
from agentrt.engine.speculate.head_config import Kind, load_head_config
from agentrt.engine.speculate.load import load_draft
from agentrt.engine.step import EngineCore

VOCAB, DRAFT_VOCAB, LAYERS = 48, 20, 4
TARGET = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_layers=LAYERS, num_heads=4,
    num_kv_heads=2, head_dim=8, context_length=256, norm_eps=1e-6, ropes=(Rope(5000.0),) * LAYERS, windows=(0,) * LAYERS,
)  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "rope_theta": 5000.0,
}  # fmt: skip
ARCHITECTURES: dict[str, str] = {"eagle3": "LlamaForCausalLMEagle3", "mtp": "LlamaForCausalLMNextN"}


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Values of a trained model's size: norms near 1, the rest near 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }


def target(seed: int = 0) -> LoadedModel:
    return LoadedModel(Decoder(TARGET, random_weights(expected_shapes(TARGET), seed)), f"random {seed}")


def write_head(folder: Path, kind: Kind, seed: int = 1, **changes: Any) -> dict[str, Tensor]:
    """A head's folder; its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = SIZES | {"architectures": [ARCHITECTURES[kind]]}
    if kind == "eagle3":
        keys |= {
            "draft_vocab_size": DRAFT_VOCAB,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        }
    (folder / "config.json").write_text(json.dumps(keys | changes))
    weights = random_weights(load_head_config(folder, kind, TARGET).shapes(), seed)
    if kind == "eagle3":
        ids_V = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
        weights["d2t"] = ids_V - torch.arange(DRAFT_VOCAB)
        weights["t2d"] = torch.isin(torch.arange(VOCAB), ids_V)
    save_file(weights, folder / "model.safetensors")
    return weights


def write_small(folder: Path, **changes: Any) -> None:
    """A small model's folder: two layers of the target's kind."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = SIZES | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2} | changes
    (folder / "config.json").write_text(json.dumps(keys))
    config = TARGET.__class__(
        **{name: getattr(TARGET, name) for name in TARGET.__struct_fields__}
        | {"num_layers": 2, "intermediate_size": 32, "vocab_size": keys["vocab_size"], "ropes": (), "windows": ()}
    )
    save_file(random_weights(expected_shapes(config), 2), folder / "model.safetensors")


def write_draft(folder: Path, kind: str) -> Path:
    if kind == "small":
        write_small(folder)
    else:
        write_head(folder, "eagle3" if kind == "eagle3" else "mtp")
    return folder


def make_core(folder: Path | None, loaded: LoadedModel | None = None, **spec: Any) -> EngineCore:
    """An engine over the tiny target; it verifies whatever the draft model says, or does not speculate without one."""
    loaded = loaded or target()
    found = EngineSpec(
        **{"page_size": 4, "kv_tokens": 1024, "host_tokens": 0, "draft_length": 3}
        | {"speculate": "auto" if folder else "off"}
        | spec
    )
    runner = ModelRunner(loaded.decoder, found)
    drafter = Drafter(load_draft(folder, loaded), runner, found, VOCAB) if folder else None
    core = EngineCore(
        runner, found, vocab_size=VOCAB, bytes_of=lambda token_id: b"%c" % (65 + token_id), drafter=drafter
    )
    keep_open(core)
    return core


def keep_open(core: EngineCore) -> None:
    """Have it verify whatever a draft model says, and nothing from text; does nothing if it does not speculate."""
    if core.speculator:
        core.speculator.gate = OpenGate()
        core.speculator.trial.note = lambda plain, spent: None  # type: ignore[method-assign]
        core.speculator._from_text = lambda sequences, terms: {}  # type: ignore[method-assign]
