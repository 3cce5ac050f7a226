"""Families that our decoder does not know, through transformers' module: its own logits, over pages, in any company."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import driving
import pytest
import torch
from driving import drain, output
from safetensors.torch import load_file, save_file

from agentrt.core.errors import UsageError, WeightsError
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.engine.local import _loaded
from agentrt.engine.model.foreign import ForeignModel, load_foreign
from agentrt.engine.model.tensors import overwrite
from agentrt.engine.runner import ModelRunner
from agentrt.engine.step import EngineCore

pytest.importorskip("transformers")

FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0},
        (0, 6),
    ),
    "phi3": ("Phi3", {"sliding_window": 7, "pad_token_id": 0}, (0,)),
    "olmo2": ("Olmo2", {}, (0,)),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5}, (0,)),
    "opt": (
        "OPT",
        {"word_embed_proj_dim": 48, "ffn_dim": 80, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        (0,),
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, (0,)),
    "llama with biases": ("Llama", {"attention_bias": True}, (0,)),
}
"""What transformers calls it, its config beside the usual sizes, and the windows of its cache groups."""
PROMPT = [(7 * i + i * i) % 61 for i in range(29)]
GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams()
MAX_TOKENS = 10


def load(folder: Path) -> ForeignModel:
    loaded = _loaded(folder, EngineSpec())
    assert isinstance(loaded.decoder, ForeignModel)
    return loaded.decoder


def make_core(model: ForeignModel, step_tokens: int = 512) -> EngineCore:
    spec = EngineSpec(page_size=4, kv_tokens=512, max_batch=min(8, step_tokens), step_tokens=step_tokens, host_tokens=0)
    return EngineCore(ModelRunner(model, spec), spec, vocab_size=61, bytes_of=lambda _: b"")


submit = partial(driving.submit, params=GREEDY, max_tokens=MAX_TOKENS)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_and_text_are_those_of_transformers(make_model: Any, run_chunks: Any, greedy: Any, family: str) -> None:
    """Logits of several texts at once, whole and in chunks; text cold, with a cached prefix, in chunks, among strangers."""
    name, changes, windows = FAMILIES[family]
    folder, theirs = make_model(name, **changes)
    model = load(folder)
    assert model.windows == windows
    texts = [torch.tensor(PROMPT), torch.tensor(PROMPT[::-1][:17])]
    with torch.inference_mode():
        expected = [theirs(text[None]).logits[0] for text in texts]
    for chunk in (29, 5):
        for found_NV, expected_NV in zip(run_chunks(model, texts, chunk), expected, strict=True):
            torch.testing.assert_close(found_NV, expected_NV, atol=2e-4, rtol=1e-5)

    core, text = make_core(model), greedy(theirs, PROMPT, MAX_TOKENS)
    cold = submit(core, PROMPT)
    drain(core)
    cached = submit(core, PROMPT)
    drain(core)
    assert (cold.cached_tokens, cached.cached_tokens) == (0, 28)
    crowd = make_core(model, step_tokens=9)
    for prompt in (PROMPT[:9], PROMPT[::-1], [3]):
        submit(crowd, prompt, params=WARM)
    crowd.step()
    batched = submit(crowd, PROMPT)
    drain(crowd)
    assert [output(sequence)[0] for sequence in (cold, cached, batched)] == [text] * 3


def test_weights_are_updated_by_the_names_of_the_module(make_model: Any, run_chunks: Any) -> None:
    """Also in place, as under CUDA graphs; with embeddings that are the output layer's weights too."""
    folder, theirs = make_model("Olmo2", tie_word_embeddings=True)
    runner = ModelRunner(load(folder), EngineSpec(page_size=4, kv_tokens=64, host_tokens=0))
    first, text = runner.decoder, torch.tensor(PROMPT)
    before_NV = run_chunks(first, [text], 29)[0]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1.25)
    weights = {name: parameter.detach() for name, parameter in theirs.named_parameters()}
    runner.stage(weights)()
    with torch.inference_mode():
        expected_NV = theirs(text[None]).logits[0]
    torch.testing.assert_close(run_chunks(runner.decoder, [text], 29)[0], expected_NV, atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(run_chunks(first, [text], 29)[0], before_NV, atol=0, rtol=0)
    del weights["model.norm.weight"]
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is missing"):
        runner.stage(weights)
    overwrite(first, runner.decoder)
    assert isinstance(first, ForeignModel)
    for name, tensor in first._module.named_parameters():
        torch.testing.assert_close(tensor.data, theirs.get_parameter(name).data, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "GptOss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
            "its attention takes s_aux, which our kernels do not",
        ),
        ("Mamba", {"state_size": 4}, "it has layers of linear_attention: only keys and values"),
        (
            "Lfm2", {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2},
            "it has layers of conv: only keys and values can be kept in pages",
        ),
        (
            "Olmo2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "its positions are of the kind dynamic",
        ),
        ("Bloom", {"n_head": 6}, "of its 2 layers 0 ask for attention by transformers' interface"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_its_reason(
    make_model: Any, family: str, changes: dict[str, Any], message: str
) -> None:
    folder, _ = make_model(family, **changes)
    with pytest.raises(UsageError, match=f"(?s)the architecture {family}.*Nor can it run.*: .*({message})"):
        _loaded(folder, EngineSpec())


def test_attention_by_the_gpus_kernels(make_model: Any, device: str) -> None:
    """Heads of 12 numbers, a window; `check` holds the logits in chunks against transformers' own."""
    if device != "cpu":
        pytest.skip("this is for machines without a GPU")
    folder, _ = make_model(
        "Phi3", sliding_window=7, pad_token_id=0, hidden_size=36, num_attention_heads=3, num_key_value_heads=1
    )
    assert load_foreign(folder, device, "why", ops="launch").decoder.check() < 1e-4


def test_what_no_check_names_shows_in_the_logits(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that mixes in the row before it: state that no page has."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

    folder, _ = make_model("Olmo2")
    plain = Olmo2MLP.forward
    monkeypatch.setattr(Olmo2MLP, "forward", lambda self, x: plain(self, x + 0.5 * torch.roll(x, 1, dims=1)))
    with pytest.raises(UsageError, match=r"read in parts, its logits are .* it keeps more than keys and values"):
        _loaded(folder, EngineSpec())


def test_what_an_engine_asks_beyond_that_is_refused(make_model: Any, tmp_path: Path) -> None:
    folder, _ = make_model("Olmo2")
    with pytest.raises(UsageError, match=r"engine.weights and engine.kv must be auto: .*Olmo2ForCausalLM"):
        _loaded(folder, EngineSpec(weights="int8"))
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["NewForCausalLM"], "model_type": "new"})
    )
    with pytest.raises(UsageError, match=r"the architecture NewForCausalLM is not supported.*Nor can it run"):
        _loaded(tmp_path, EngineSpec())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    with pytest.raises(UsageError, match="quantization_config"):
        _loaded(tmp_path, EngineSpec())
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"Nor can it run .*: its files lack model\.norm\.weight"):
        _loaded(tmp_path, EngineSpec())
