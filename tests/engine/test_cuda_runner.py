"""The GPU's runner, as far as it can be had without one: its kernels by Triton's interpreter, its padding by their logits."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrt.core.errors import UsageError
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.engine.batch import Batch
from agentrt.engine.model.config import load_config
from agentrt.engine.model.decoder import Decoder, PagedKV, expected_shapes, ops_for
from agentrt.engine.sequence import Sequence
from agentrt.engine.step import EngineCore
from agentrt.testing.toy import ToyRunner, hashed_logits

pytest.importorskip("triton")

from agentrt.engine import cuda_runner
from agentrt_kernels.paged_attention.launch import DevicePlan
from agentrt_kernels.paged_attention.plan import plan_attention

PAGE = 4
LENGTHS = (9, 2, 14)
PAGES = 12
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}


def prompts_then_decodes() -> tuple[Batch, Batch]:
    """Three prompts but for their last ids, and a step of decodes for these."""
    rng = np.random.default_rng(0)
    tables_GSP = rng.permutation(PAGES).astype(np.int32).reshape(1, 3, 4)
    counts = [length - 1 for length in LENGTHS]
    positions_N = np.concatenate([np.arange(count) for count in counts])
    table_of_N = np.repeat(np.arange(3, dtype=np.int32), counts)
    last_S = np.array(counts, dtype=np.int64)
    return (
        Batch(rng.integers(0, 61, len(positions_N)), positions_N, table_of_N, tables_GSP, np.array([0]), []),
        Batch(rng.integers(0, 61, 3), last_S, np.arange(3, dtype=np.int32), tables_GSP, np.arange(3), []),
    )


def new_kv(decoder: Decoder, pages: int) -> list[PagedKV]:
    return [PagedKV(torch.zeros(pages * layout.page_stride), layout) for layout in decoder.page_layouts(PAGE)]


# Nothing is written for the rows that were added, so numpy, by which the interpreter computes, meets any number there.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
def test_a_padded_step_of_decodes_has_the_same_logits(tmp_path: Path, device: str) -> None:
    if device != "cpu":
        pytest.skip("this is for machines without a GPU")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    config = load_config(tmp_path)
    weights = {name: torch.randn(shape) * 0.3 for name, shape in expected_shapes(config).items()}
    prompts, decodes = prompts_then_decodes()
    arrays = [torch.from_numpy(array) for batch in (prompts, decodes) for array in batch[:5]]
    reference = Decoder(config, weights, "reference")
    kv = new_kv(reference, PAGES + 1)
    reference.forward(*arrays[:4], kv, arrays[4])
    before = kv[0].pool.clone()
    expected_SV = reference.forward(*arrays[5:9], kv, arrays[9])

    assert [cuda_runner.is_graphed(batch) for batch in (prompts, decodes)] == [False, True]
    plan = plan_attention(*decodes[1:3], decodes.tables_GSP[0], PAGE, tile_rows=8)
    shape = cuda_runner.shape_of(decodes, plan, lanes_a_row=3)
    assert shape == cuda_runner.Shape(rows=4, sequences=4, places=4, items=4, parts=1, slots=0, lanes=16)
    inputs = [torch.from_numpy(array) for array in cuda_runner.pad(decodes, plan, shape, [PAGES])]
    assert inputs[3][0, 3].tolist() == [PAGES] * 4
    padded_kv = [kv[0]._replace(pool=before)]
    device_plan = DevicePlan(inputs[5], inputs[6], shape.slots, shape.lanes)
    padded_NV = Decoder(config, weights, "launch").forward(
        *inputs[:4], padded_kv, torch.arange(shape.rows), device_plan
    )
    torch.testing.assert_close(padded_NV[:3], expected_SV, atol=1e-4, rtol=0)
    used = PAGES * padded_kv[0].layout.page_stride
    torch.testing.assert_close(padded_kv[0].pool[:used], kv[0].pool[:used], atol=1e-5, rtol=1e-5)


def test_operations_are_chosen_by_device() -> None:
    assert ops_for(torch.device("cpu")) == ("cpu", torch.float32)
    assert ops_for(torch.device("cuda:0")) == ("launch", torch.bfloat16)
    assert ops_for(torch.device("mps")) == ("reference", torch.float32)


class DeviceToyRunner(ToyRunner):
    """Its logits stay where a GPU's would."""

    def run(self, batch: Batch) -> Tensor:
        return torch.from_numpy(super().run(batch))


@pytest.mark.usefixtures("device")
def test_logits_on_a_device_give_the_same_ids() -> None:
    """Of two requests one is greedy; ids are equal, logprobs to the law's own exactness."""
    found = []
    for runner_class in (ToyRunner, DeviceToyRunner):
        runner = runner_class(hashed_logits(50))
        core = EngineCore(runner, EngineSpec(page_size=4), vocab_size=50, bytes_of=lambda token_id: b"x")
        law = SamplingParams(temperature=0.8, top_p=0.9)
        sequences = [
            Sequence(tokens=Tokens(), params=params, max_tokens=3, seed=seed)
            for seed, params in enumerate((law, SamplingParams(temperature=0.0)))
        ]
        for sequence in sequences:
            sequence.tokens.observe([1, 2, 3])
            core.submit(sequence, core.open())
        while not core.is_idle:
            core.step()
            core.check()
        found.append(
            [(sequence.tokens.token_ids.tolist(), sequence.tokens.logprobs.tolist()) for sequence in sequences]
        )
    for (ids, logprobs), (expected_ids, expected) in zip(found[1], found[0], strict=True):
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected, abs=1e-6)


def test_flashinfer_that_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = EngineSpec(attention="flashinfer")
    with pytest.raises(UsageError, match="is for models of our own decoder without latents; take auto"):
        cuda_runner.CudaRunner(None, spec)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    config = load_config(tmp_path)
    decoder = Decoder(config, {name: torch.zeros(shape) for name, shape in expected_shapes(config).items()}, "launch")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(UsageError, match=r"needs FlashInfer \(.*\): pip install 'agentrt\[flashinfer\]', or take auto"):
        cuda_runner.CudaRunner(decoder, spec)


def test_a_page_size_that_the_kernels_do_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match=r"engine.page_size must divide 512 on a GPU, but it is 24; take 16"):
        cuda_runner.CudaRunner(None, EngineSpec(page_size=24))
