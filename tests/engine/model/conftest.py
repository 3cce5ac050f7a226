"""Tiny random models, as folders and as decoders, and one way to run prompts through pages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrt.engine.model.decoder import Decoder, PagedKV

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    import transformers

    def make(family: str, **changes: Any) -> tuple[Path, Any]:
        """A random model of transformers, and the folder it is saved in."""
        torch.manual_seed(7)
        config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
        config = config_class(**{**SIZES, **changes})
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                torch.nn.init.normal_(buffer, 0.0, 0.3)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        return folder, model

    return make


@pytest.fixture
def run_chunks() -> Callable[..., list[Tensor]]:
    def run(
        decoder: Decoder, prompts: list[Tensor], chunk: int, page_size: int = 4, chosen: int | None = None
    ) -> list[Tensor]:
        """The logits of every position of each prompt; each forward takes the next `chunk` ids of all of them."""
        layouts = decoder.page_layouts(page_size)
        longest = max(len(prompt) for prompt in prompts)
        pages = -(-longest // page_size)
        num_pages = len(prompts) * pages
        tables_GSP = torch.stack([torch.randperm(num_pages, dtype=torch.int32) for _ in layouts])
        tables_GSP = tables_GSP.view(len(layouts), len(prompts), pages)
        kv = [PagedKV(torch.full((num_pages * layout.page_stride,), torch.nan), layout) for layout in layouts]
        logits: list[list[Tensor]] = [[] for _ in prompts]
        for start in range(0, longest, chunk):
            parts = [prompt[start : start + chunk] for prompt in prompts]
            table_of_N = torch.cat([torch.full((len(part),), row, dtype=torch.int32) for row, part in enumerate(parts)])
            positions_N = torch.cat([torch.arange(start, start + len(part)) for part in parts])
            rows_N = torch.arange(len(positions_N))
            out_NV = decoder.forward(torch.cat(parts), positions_N, table_of_N, tables_GSP, kv, rows_N)
            for row in range(len(prompts)):
                logits[row].append(out_NV[table_of_N == row])
        return [torch.cat(parts) for parts in logits]

    return run


@pytest.fixture
def greedy() -> Callable[[Any, list[int], int], list[int]]:
    def run(model: Any, prompt: list[int], count: int) -> list[int]:
        """What transformers continues a prompt with, one full forward for each id."""
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    return run
