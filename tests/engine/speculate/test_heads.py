"""Draft heads: their arithmetic against a plain transcription of the published one, and what is refused at the start."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from heads import DRAFT_VOCAB, LAYERS, TARGET, VOCAB, make_core, target, write_draft, write_head, write_small
from torch import Tensor

from agentrt.core.errors import UsageError
from agentrt.engine.model.decoder import PagedKV
from agentrt.engine.speculate.head import DraftHead
from agentrt.engine.speculate.head_config import Kind
from agentrt.engine.speculate.load import load_draft

IDS = torch.tensor([7, 3, 3, 41, 0, 19, 30, 5, 8, 2])


def norm(x_TD: Tensor, weight_D: Tensor) -> Tensor:
    return F.rms_norm(x_TD, weight_D.shape, weight_D, 1e-6)


def turn(x_THR: Tensor) -> Tensor:
    """Rotary positions, as the published code has them."""
    frequencies = 1.0 / 5000.0 ** (torch.arange(0, 8, 2) / 8)
    angles = torch.arange(len(x_THR))[:, None] * frequencies
    cos, sin = (torch.cat([part, part], dim=1)[:, None] for part in (angles.cos(), angles.sin()))
    first, second = x_THR.chunk(2, dim=-1)
    return x_THR * cos + torch.cat([-second, first], dim=-1) * sin


def attended(x_TE: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    q, k, v = (
        F.linear(x_TE, weights[f"{prefix}self_attn.{name}_proj.weight"]).view(len(x_TE), -1, 8) for name in "qkv"
    )
    k, v = turn(k).repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    out = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in (turn(q), k, v)), is_causal=True)
    return F.linear(out.transpose(0, 1).flatten(1), weights[f"{prefix}self_attn.o_proj.weight"])


def expected(kind: Kind, weights: dict[str, Tensor], taken_TF: Tensor) -> tuple[Tensor, Tensor]:
    """The law and the feature of every row."""
    decoder = target().decoder
    embedded = decoder.embedding_VD[IDS]
    if kind == "eagle3":
        prefix, features = "midlayer.", F.linear(taken_TF, weights["fc.weight"])
        both = (
            norm(embedded, weights["midlayer.input_layernorm.weight"]),
            norm(features, weights["midlayer.hidden_norm.weight"]),
        )
        residual, x = features, torch.cat(both, dim=1)
    else:
        prefix, features = f"model.layers.{LAYERS}.", norm(taken_TF, decoder.norm_D)
        both = norm(embedded, weights[f"{prefix}enorm.weight"]), norm(features, weights[f"{prefix}hnorm.weight"])
        residual = F.linear(torch.cat(both, dim=1), weights[f"{prefix}eh_proj.weight"])
        x = norm(residual, weights[f"{prefix}input_layernorm.weight"])
    residual = residual + attended(x, weights, prefix)
    x = norm(residual, weights[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (F.linear(x, weights[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    residual = residual + F.linear(F.silu(gate) * up, weights[f"{prefix}mlp.down_proj.weight"])
    if kind == "eagle3":
        return F.linear(norm(residual, weights["norm.weight"]), weights["lm_head.weight"]), residual
    return decoder.head(norm(residual, weights[f"{prefix}shared_head.norm.weight"])), residual


@pytest.mark.parametrize("chunk", [1, 4, 10])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_published_arithmetic(kind: Kind, chunk: int, tmp_path: Path) -> None:
    """Whole, in chunks and row by row over pages; 2e-4 is what packing to float16 and another order of sums cost."""
    weights = write_head(tmp_path, kind)
    head = load_draft(tmp_path, target())
    assert isinstance(head, DraftHead)
    taken_TF = torch.randn(len(IDS), 24 * len(head.taps), generator=torch.Generator().manual_seed(3))
    (layout,) = head.page_layouts(4)
    kv, tables = [PagedKV(torch.zeros(3 * layout.page_stride), layout)], torch.tensor([[[2, 0, 1]]], dtype=torch.int32)
    logits, features = [], []
    for start in range(0, len(IDS), chunk):
        rows = torch.arange(start, min(start + chunk, len(IDS)))
        one = torch.zeros(len(rows), dtype=torch.int32)
        step = head.forward(IDS[rows], rows, one, tables, kv, torch.arange(len(rows)), head.fuse(taken_TF[rows]))
        assert step.features_MD is not None
        logits.append(step.logits_MV)
        features.append(step.features_MD)
    expected_logits, expected_features = expected(kind, weights, taken_TF)
    torch.testing.assert_close(torch.cat(logits), expected_logits, atol=5e-3, rtol=2e-3)
    torch.testing.assert_close(torch.cat(features), expected_features, atol=5e-3, rtol=2e-3)


def test_the_published_names_and_shapes(tmp_path: Path) -> None:
    """EAGLE-3 as SpecForge writes it, MTP as DeepSeek-V3 names it; the lists of docs/speculation.md."""
    eagle, mtp = write_head(tmp_path / "eagle3", "eagle3"), write_head(tmp_path / "mtp", "mtp")
    layer = {
        "input_layernorm.weight": (24,), "post_attention_layernorm.weight": (24,), "mlp.gate_proj.weight": (32, 24),
        "mlp.up_proj.weight": (32, 24), "mlp.down_proj.weight": (24, 32), "self_attn.o_proj.weight": (24, 32),
    }  # fmt: skip

    def attention(width: int) -> dict[str, tuple[int, int]]:
        sizes = {"q": 32, "k": 16, "v": 16}
        return {f"self_attn.{name}_proj.weight": (size, width) for name, size in sizes.items()}

    assert {name: tuple(tensor.shape) for name, tensor in eagle.items()} == {
        "fc.weight": (24, 72), "norm.weight": (24,), "lm_head.weight": (DRAFT_VOCAB, 24), "d2t": (DRAFT_VOCAB,),
        "t2d": (VOCAB,), "midlayer.hidden_norm.weight": (24,),
        **{f"midlayer.{name}": shape for name, shape in (layer | attention(48)).items()},
    }  # fmt: skip
    own = {"enorm.weight": (24,), "hnorm.weight": (24,), "eh_proj.weight": (24, 48), "shared_head.norm.weight": (24,)}
    assert {name: tuple(tensor.shape) for name, tensor in mtp.items()} == {
        f"model.layers.{LAYERS}.{name}": shape for name, shape in (layer | attention(24) | own).items()
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 50}, "vocab_size is 50 and must be 48 to draft for this model"),
        ({"hidden_size": 32}, "hidden_size is 32 and must be 24"),
        ({"max_position_embeddings": 128}, "its context of 128 ids is shorter than the model's, 256"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, "must name different layers of the 4"),
        ({"draft_vocab_size": 21}, "is (20, 24) and by config.json (21, 24)"),
        ({"norm_before_residual": True}, "norm_before_residual is True and must be False"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "the rope type 'longrope' is not supported"),
        ({"num_attention_heads": 0}, "Expected `int` >= 1 - at `$.num_attention_heads`"),
        ({"max_position_embeddings": -3}, "Expected `int` >= 1 - at `$.max_position_embeddings`"),
        ({"rms_norm_eps": -1.0}, "Expected `float` >= 0.0 - at `$.rms_norm_eps`"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a", 1, 2]}}, "Expected `int`, got `str`"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "Expected `array | null`, got `int`"),
        ({"num_key_value_heads": 3}, "4 heads of 8 numbers, which must be even, must share 3 KV heads evenly"),
        ({"head_dim": 7}, "4 heads of 7 numbers, which must be even"),
        ({"draft_vocab_size": 49}, "49 drafted ids be of 48"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2 and must be 1"),
    ],
)
def test_a_head_of_another_model_is_refused(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    write_head(tmp_path, "eagle3")
    config = tmp_path / "config.json"
    import json

    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(UsageError) as caught:
        load_draft(tmp_path, target())
    assert said in str(caught.value)


def test_a_small_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    write_small(tmp_path, vocab_size=47)
    with pytest.raises(UsageError, match="vocab_size is 47 and must be 48"):
        load_draft(tmp_path, target())


def test_latent_attention_is_refused_by_the_tensor_that_lacks(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = write_head(tmp_path, "mtp")
    weights = {name.replace("q_proj", "q_a_proj"): tensor for name, tensor in weights.items()}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"model.layers.4.self_attn.q_proj.weight is missing"):
        load_draft(tmp_path, target())


@pytest.mark.parametrize(
    ("name", "said"), [("d2t", "a map is of whole numbers"), ("norm.weight", "a weight of floats")]
)
def test_tensors_of_another_kind_are_refused(name: str, said: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = write_head(tmp_path, "eagle3")
    weights[name] = weights[name].float() + 0.5 if name == "d2t" else weights[name].long()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=f"{name} is of torch.*{said}"):
        load_draft(tmp_path, target())


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "small"])
def test_drafts_are_ids_of_the_target(kind: str, tmp_path: Path) -> None:
    """Pitfall 8: a part of the vocabulary is mapped, and nothing else is ever drafted."""
    core = make_core(write_draft(tmp_path, kind))
    assert core.speculator is not None
    drafter = core.speculator.drafter
    assert drafter is not None
    ids_V = drafter.model.ids_V
    assert (ids_V is None) == (kind != "eagle3")
    if ids_V is not None:
        assert sorted(set(ids_V.tolist())) == ids_V.tolist()
        assert max(ids_V.tolist()) < VOCAB
    assert TARGET.vocab_size == VOCAB
