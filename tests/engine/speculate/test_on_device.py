"""Draft models beside the GPU's runner, as far as they can be had without one: its kernels by Triton's interpreter.

In place of captured graphs there is the same forward over memory that each replay overwrites.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from heads import LAYERS, TARGET, VOCAB, keep_open, random_weights, target, write_draft
from torch import Tensor

from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.engine.batch import Batch
from agentrt.engine.kv.pages import PageCopy
from agentrt.engine.model.decoder import Decoder, expected_shapes
from agentrt.engine.model.loader import LoadedModel
from agentrt.engine.model.tensors import tensors_of
from agentrt.engine.runner import ModelRunner
from agentrt.engine.sequence import Sequence as Request
from agentrt.engine.speculate import drafter as drafter_module
from agentrt.engine.speculate.drafter import Drafter
from agentrt.engine.speculate.load import load_draft
from agentrt.engine.step import EngineCore

pytest.importorskip("triton")

from agentrt.engine import cuda_runner
from agentrt_kernels.paged_attention.flashinfer import FlashPlan
from agentrt_kernels.paged_attention.launch import paged_attention

# Nothing is written for the rows that were added, so numpy, by which the interpreter computes, meets any number there.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
SPEC = EngineSpec(
    page_size=4, kv_tokens=128, host_tokens=0, speculate="auto", draft_length=2, max_batch=4, step_tokens=32
)


class Replayed:
    """In place of a captured graph."""

    def __init__(self, run: Callable[[list[Tensor]], Any], inputs: Any, device: torch.device, memory: None) -> None:
        self._run, self._given, self.replays = run, list[Tensor](), 0

    @torch.inference_mode()
    def replay(self, inputs: Any) -> Any:
        for overwritten in self._given:
            overwritten.fill_(torch.nan)
        result = self._run([torch.from_numpy(array) for array in inputs])
        self._given, self.replays = list(tensors_of(result)), self.replays + 1
        return result


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch, device: str) -> Decoder:
    """The target, by the GPU's operations; whose runner is made then needs no GPU."""
    if device != "cpu":
        pytest.skip("this is for machines without a GPU")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(cuda_runner, "_Graph", Replayed)
    monkeypatch.setattr(cuda_runner.CudaRunner, "_make_mover", lambda *_: None)
    monkeypatch.setattr(cuda_runner.CudaRunner, "_measured_cost_per_key", lambda _: 0.0)
    monkeypatch.setattr(drafter_module, "PROBE_COUNTS", (1,))
    monkeypatch.setattr(drafter_module, "PROBE_RUNS", 1)
    return Decoder(TARGET, random_weights(expected_shapes(TARGET), 0), "launch")


def steps() -> tuple[Batch, Batch]:
    """Prompts of two sequences, whose tables are not in order, then a row of the first and a draft of the second."""
    tables_GSP = np.array([[[9, 4, 2], [3, 7, 1]]], dtype=np.int32)
    rng = np.random.default_rng(0)

    def batch(positions: list[list[int]], out: list[int]) -> Batch:
        table_of_N = np.repeat(np.arange(2, dtype=np.int32), [len(part) for part in positions])
        positions_N = np.concatenate([np.array(part) for part in positions])
        return Batch(rng.integers(0, VOCAB, len(positions_N)), positions_N, table_of_N, tables_GSP, np.array(out), [])

    return batch([list(range(7)), list(range(5))], [6, 11]), batch([[7], [5, 6]], [0, 1, 2])


def test_hidden_states_are_handed_out_from_graphs_and_chunks(decoder: Decoder) -> None:
    """As the reference has them, in the batch's order; a replay leaves those of the step before as they were."""
    runner = cuda_runner.CudaRunner(decoder, SPEC)
    reference = ModelRunner(Decoder(TARGET, random_weights(expected_shapes(TARGET), 0), "reference"), SPEC)
    runner.taps = reference.taps = (1, LAYERS)
    found = []
    for batch in steps():
        logits_MV, expected_MV = runner.run(batch), torch.from_numpy(reference.run(batch))
        torch.testing.assert_close(logits_MV, expected_MV, atol=1e-4, rtol=0)
        assert runner.features_NF is not None
        assert reference.features_NF is not None
        assert runner.features_NF.shape == (len(batch.positions_N), 2 * TARGET.hidden_size)
        found.append((runner.features_NF, reference.features_NF))
    for features_NF, expected_NF in found:
        torch.testing.assert_close(features_NF, expected_NF, atol=1e-4, rtol=1e-4)
    assert [shape.taps for shape in runner._graphs] == [(1, LAYERS)]
    runner.taps = ()
    runner.run(steps()[1])
    assert runner.features_NF is None
    assert [shape.taps for shape in runner._graphs] == [(1, LAYERS), ()]
    torch.testing.assert_close(*found[1], atol=1e-4, rtol=1e-4)


def test_flashinfer_serves_what_is_not_replayed(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with prompts is planned once for all layers by it; decodes are replayed with our own attention."""
    seen = list[tuple[int, int]]()

    class Attention:
        def __init__(self, device: torch.device) -> None:
            assert device == decoder.device

        def plan(self, positions_N: Any, table_of_N: Any, tables_GSP: Any, *_: Any) -> FlashPlan:
            places = [torch.from_numpy(array) for array in (positions_N, table_of_N, tables_GSP[0])]

            class Ours(FlashPlan):
                def attend(self, q_NHD: Tensor, pool: Tensor, layout: Any, layer: int, window: int) -> Tensor:
                    seen.append((len(positions_N), layer))
                    return paged_attention(q_NHD, *places, pool, layout, layer, window)

            return Ours({})

    monkeypatch.setattr(cuda_runner, "FlashInfer", Attention)
    runner = cuda_runner.CudaRunner(decoder, msgspec.structs.replace(SPEC, attention="flashinfer"))
    plain = cuda_runner.CudaRunner(decoder, SPEC)
    for batch in steps():
        torch.testing.assert_close(runner.run(batch), plain.run(batch), atol=1e-4, rtol=0)
    assert seen == [(12, layer) for layer in range(LAYERS)]


def test_a_branch_in_a_graph_has_the_logits_of_a_chain(decoder: Decoder) -> None:
    """A second way to go on from the second sequence's last id, in a page that copies what was there; twins are padded."""
    runner = cuda_runner.CudaRunner(decoder, SPEC)
    prompts, _ = steps()
    tables_GSP = np.array([[[9, 4, 2], [3, 7, -1], [3, 8, 5]]], dtype=np.int32)
    table_of_N, positions_N = np.array([0, 1, 1, 2, 2, 2], dtype=np.int32), np.array([7, 5, 6, 6, 7, 8])
    tree = Batch(
        np.array([1, 2, 3, 4, 5, 6]), positions_N, table_of_N, tables_GSP, np.arange(6), [], np.array([1]),
        np.array([2], dtype=np.int32),
    )  # fmt: skip
    runner.run(prompts)
    runner.copy_page(PageCopy(0, 7, 8))
    found_MV = runner.run(tree)
    assert [(shape.rows, shape.sequences, shape.twins) for shape in runner._graphs] == [(8, 4, 1)]
    found_MV = found_MV.clone()
    for table, ids in ((1, [2, 3]), (2, [2, 4, 5, 6])):
        rows = np.arange(len(ids))
        chain_GSP = np.array([[[3, 7, 6]]], dtype=np.int32)
        chain = Batch(np.array(ids), 5 + rows, np.zeros(len(ids), dtype=np.int32), chain_GSP, rows, [])
        expected_MV, own = runner.run(chain), table_of_N == table
        torch.testing.assert_close(found_MV[own], expected_MV[-own.sum() :], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "small"])
def test_a_draft_model_drafts_on_the_device(kind: str, decoder: Decoder, tmp_path: Path) -> None:
    """The engine says what it says on the CPU without one."""
    said = []
    for draft in (None, write_draft(tmp_path, kind)):
        runner = cuda_runner.CudaRunner(decoder, SPEC) if draft else ModelRunner(target().decoder, SPEC)
        drafter = Drafter(load_draft(draft, LoadedModel(decoder, "")), runner, SPEC, VOCAB) if draft else None
        core = EngineCore(runner, SPEC, vocab_size=VOCAB, bytes_of=lambda token_id: b"x", drafter=drafter)
        keep_open(core)
        requests = []
        for seed, temperature in enumerate((0.8, 0.0)):
            tokens = Tokens()
            tokens.observe([1, 2, 3, 4, 5 + seed])
            params = SamplingParams(temperature=temperature)
            requests.append(Request(tokens=tokens, params=params, max_tokens=4, seed=seed))
            core.submit(requests[-1], core.open())
        while not core.is_idle:
            core.step()
            core.check()
        said.append([request.tokens.token_ids.tolist() for request in requests])
        assert (sum(request.drafted for request in requests) > 0) == (draft is not None)
        if drafter is not None:
            # The pass by which its time is first known, both prompts, and an id more of each request, in two steps.
            graphs = runner._draft_graphs.items()  # type: ignore[union-attr]
            assert {shape.rows: graph.replays for shape, (graph, _) in graphs} == {1: 1, 16: 1, 2: 2}
    assert said[1] == said[0]
