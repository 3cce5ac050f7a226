"""Training a head: what it is unrolled to is what it drafts, what it learns from, and that nothing reaches the policy."""

from pathlib import Path

import msgspec
import pytest
import torch
from heads import DRAFT_VOCAB, LAYERS, TARGET, VOCAB, target, write_head
from safetensors.torch import load_file
from structlog.testing import capture_logs

from agentrt.core import models
from agentrt.core.errors import UsageError
from agentrt.engine.model.decoder import PagedKV
from agentrt.engine.model.linear import Linear
from agentrt.engine.model.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling, rope_tables
from agentrt.engine.speculate import offline, train
from agentrt.engine.speculate.head import DraftHead
from agentrt.engine.speculate.head_config import Kind, load_head_config
from agentrt.engine.speculate.load import load_draft
from agentrt.engine.speculate.train import DraftTrainer, Pass, fresh_weights, unrolled

KINDS = ["eagle3", "mtp"]
IDS = torch.tensor([[7, 3, 3, 41, 0, 19, 30, 5, 8, 2]])


def given(kind: Kind, is_sampled: list[int] | None = None, seed: int = 3) -> Pass:
    """A pass of the tiny policy over `IDS`, its hidden states and laws made up."""
    generator = torch.Generator().manual_seed(seed)
    decoder, width = target().decoder, 24 * (3 if kind == "eagle3" else 1)
    return Pass(
        IDS, torch.tensor([is_sampled or [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]]).bool(),
        torch.randn(1, IDS.shape[1], width, generator=generator), torch.randn(1, IDS.shape[1], VOCAB, generator=generator) * 3,
        decoder.embedding_VD, decoder.embedding_VD.flip(0),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_training_unrolls_what_is_drafted(kind: Kind, tmp_path: Path) -> None:
    """At each depth the law after id j is that of the engine's head: true rows up to j - depth, then a chain."""
    weights = write_head(tmp_path, kind)
    head = load_draft(tmp_path, target())
    assert isinstance(head, DraftHead)
    one, depths = given(kind), 4
    if kind == "mtp":  # in the engine the head norms the hidden state itself
        head.fuse = lambda taken_NF: taken_NF  # type: ignore[method-assign]
        one = one._replace(output_VD=torch.randn(VOCAB, 24, generator=torch.Generator().manual_seed(5)))
        head.target.head = Linear(one.output_VD)
    trained = unrolled(
        head.config,
        {name: tensor.float() for name, tensor in weights.items()},
        one,
        torch.ones_like(IDS).bool(),
        depths,
    )
    (layout,) = head.page_layouts(4)
    tables, length = torch.tensor([[[0, 1, 2]]], dtype=torch.int32), IDS.shape[1]
    features = torch.cat([torch.zeros(1, 24), head.fuse(one.hidden_BTF[0])])[:length]
    for start in range(1, length - depths):
        kv = [PagedKV(torch.zeros(3 * layout.page_stride), layout)]
        rows = torch.arange(start)
        step = head.forward(
            IDS[0, rows], rows, rows.int() * 0, tables, kv, torch.tensor([start - 1]), features[rows].contiguous()
        )
        for depth in range(depths):
            torch.testing.assert_close(step.logits_MV[0], trained[depth][start - 1 + depth], atol=6e-3, rtol=5e-3)
            place = torch.tensor([start + depth])
            assert step.features_MD is not None
            step = head.forward(IDS[0, place], place, place.int() * 0, tables, kv, torch.tensor([0]), step.features_MD)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_the_policys_law(kind: Kind, tmp_path: Path) -> None:
    """The overlap with a fixed law grows at every depth; only the head's own tensors change."""
    write_head(tmp_path, kind)
    config = load_head_config(tmp_path, kind, TARGET)
    one = given(kind)
    trainer = DraftTrainer(config, fresh_weights(config, one.embedding_VD))
    _, before = trainer.loss(one, 3)
    for _ in range(60):
        report = trainer.step(one, 3)
    assert report.rows == [8, 7, 6]
    assert report.loss < 0.8 * before.loss
    assert all(now > then + 0.1 for now, then in zip(report.overlaps, before.overlaps, strict=True))
    for tensor in (one.hidden_BTF, one.logits_BTV, one.embedding_VD, one.output_VD):
        assert tensor.grad is None


def test_only_what_was_sampled_is_learnt(tmp_path: Path) -> None:
    """Rows before sampled ids count, and chains never reach across what a tool said."""
    write_head(tmp_path, "eagle3")
    config = load_head_config(tmp_path, "eagle3", TARGET)
    mask = [0, 0, 1, 1, 0, 0, 1, 1, 1, 0]
    trainer = DraftTrainer(config, fresh_weights(config, target().decoder.embedding_VD))
    one = given("eagle3", mask)
    loss, report = trainer.loss(one, 3)
    assert (report.rows, len(report.overlaps)) == ([5, 3, 1], 3)
    other = one.logits_BTV.clone()
    for row in (0, 3, 4, 8, 9):  # the ids after these rows were not sampled
        other[0, row] = 7.0
    assert torch.equal(trainer.loss(one._replace(logits_BTV=other), 3)[0], loss)
    other[0, 7] = torch.arange(VOCAB).float()
    assert not torch.equal(trainer.loss(one._replace(logits_BTV=other), 3)[0], loss)
    with pytest.raises(ValueError, match="none of these ids was sampled"):
        trainer.loss(given("eagle3", [1, *[0] * 9]), 2)


def test_nothing_reaches_the_policy(tmp_path: Path) -> None:
    """Hidden states, laws and embedding of a pass that could be differentiated come detached."""
    from agentrt.engine.speculate.train import policy_pass

    write_head(tmp_path, "eagle3")
    config = load_head_config(tmp_path, "eagle3", TARGET)
    policy = torch.nn.Parameter(torch.randn(1, 10, 24))
    states = [policy * (layer + 1) for layer in range(LAYERS + 1)]
    table = torch.nn.Parameter(torch.randn(VOCAB, 24))
    one = policy_pass(IDS, torch.ones(1, 10), states, states[-1] @ table.T, table, table, config)
    torch.testing.assert_close(one.hidden_BTF[..., 24:48], 3 * policy.detach())
    DraftTrainer(config, fresh_weights(config, table)).step(one, 2)
    assert policy.grad is None
    assert table.grad is None


def test_a_checkpoint_round_trip(tmp_path: Path) -> None:
    """What is trained is written by its published names and drafts the same after it is read."""
    weights = write_head(tmp_path, "eagle3")
    config = load_head_config(tmp_path, "eagle3", TARGET)
    trainer = DraftTrainer(config, weights)
    state = trainer.state()
    assert state.keys() == weights.keys()
    assert torch.equal(state["d2t"], weights["d2t"])
    assert torch.equal(state["t2d"], weights["t2d"])
    assert len(state["d2t"]) == DRAFT_VOCAB
    assert all(name.startswith("draft.") for name in trainer.update())
    assert "draft.d2t" not in trainer.update()


def test_the_trainers_hook_refreshes_only_when_that_pays(tmp_path: Path) -> None:
    """An update took 0.5 s; 10,000 ids at 1 instead of 2 accepted lose 16.7 s in steps of 10 ms. Both are logged."""
    write_head(tmp_path, "eagle3")
    config = load_head_config(tmp_path, "eagle3", TARGET)
    trainer = DraftTrainer(config, fresh_weights(config, target().decoder.embedding_VD))
    trainer.step(given("eagle3"), 1)
    assert trainer.steps == 1
    assert trainer.seconds > 0
    trainer.steps, trainer.seconds = 4, 2.0
    with capture_logs() as logs:
        assert trainer.is_due(2.0, 1.0, 10_000, 0.01, steps=33)
        assert not trainer.is_due(2.0, 1.0, 10_000, 0.01, steps=34)
    assert [(log["cost_seconds"], round(log["lost_seconds"], 2), log["is_due"]) for log in logs] == [
        (16.5, 16.67, True), (17.0, 16.67, False)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_where_its_tensors_are(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU too: whatever it makes is made where what it was given is, never where tensors are made by default."""
    write_head(tmp_path, kind)
    config = load_head_config(tmp_path, kind, TARGET)
    one = given(kind)
    weights, tables = fresh_weights(config, one.embedding_VD), rope_tables(config.rope, config.head_dim, IDS.shape[1])
    monkeypatch.setattr(train, "rope_tables", lambda *sizes: tables)  # which are made on the host
    with torch.device("meta"):  # a tensor that is made anywhere by default cannot be computed with
        trainer = DraftTrainer(config, weights)
        assert trainer.step(one, 3).rows == [8, 7, 6]
        assert {tensor.device.type for tensor in trainer.state().values()} == {"cpu"}


def test_overlaps_are_means_over_the_rows_of_their_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of which many rows are at the first depth and few below counted there as if all were."""
    write_head(tmp_path, "eagle3")
    config = load_head_config(tmp_path, "eagle3", TARGET)
    trainer = DraftTrainer(config, fresh_weights(config, target().decoder.embedding_VD))
    masks = [0, 1, 0, 1, 0, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    texts = [offline.Text(IDS[0].numpy(), torch.tensor(mask).numpy()) for mask in masks]
    passes = {
        id(text.mask): given("eagle3", list(mask), seed)
        for seed, (text, mask) in enumerate(zip(texts, masks, strict=True))
    }
    monkeypatch.setattr(offline, "BATCH_TOKENS", 10)
    monkeypatch.setattr(offline, "read_by", lambda policy, batch, config: passes[id(batch[0].mask)])
    reports = [trainer.loss(one, 5)[1] for one in passes.values()]
    assert [report.rows for report in reports] == [[6, 2, 1], [9, 8, 7, 6, 5], [5]]
    found = offline.overlaps(trainer, offline.Policy(target().decoder, IDS), texts, 5)
    assert found[0] == pytest.approx(sum(report.overlaps[0] * report.rows[0] for report in reports) / 20)
    assert found[1] == pytest.approx((reports[0].overlaps[1] * 2 + reports[1].overlaps[1] * 8) / 10)
    assert found[3] == pytest.approx(reports[1].overlaps[3])


def test_texts_of_another_model_are_refused() -> None:
    """Ids beyond its embedding, or places beyond its angles, which compiled code would read from wherever."""
    whole = offline.Text(torch.zeros(257, dtype=torch.int32).numpy(), torch.ones(257, dtype=torch.int8).numpy())
    with pytest.raises(
        UsageError, match="hold 257 ids in a row and id 0, and the model has a context of 256 and 48 ids"
    ):
        offline._check_fits([whole], TARGET)
    with pytest.raises(UsageError, match="hold 10 ids in a row and id 48"):
        offline._check_fits([offline.Text((IDS[0] + 7).numpy(), IDS[0].numpy())], TARGET)


def test_of_a_long_text_the_beginning_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory grows with the square of a text's length. What is sampled behind the cut only is nothing to learn from."""
    model = models.find_model("sprout")
    monkeypatch.setattr(offline, "LONGEST", 12)

    def text(length: int, first_sampled: int) -> offline.Text:
        ids, mask = range(20, 20 + length), [int(place >= first_sampled) for place in range(length)]
        return offline.Text(torch.tensor(ids).numpy(), torch.tensor(mask).numpy())

    def head(name: str, texts: list[offline.Text]) -> tuple[int, dict[str, torch.Tensor]]:
        outcome = offline.train_head(model, texts, tmp_path / name, "eagle3", steps=2, depths=2, vocabulary=64)
        return outcome.num_cut, load_file(tmp_path / name / "model.safetensors")

    long, short = [text(30, 4), text(12, 2), text(13, 6)], [text(12, 4), text(12, 2), text(12, 6)]
    (num_cut, whole), (none, cut) = head("whole", long), head("cut", short)
    assert (num_cut, none) == (2, 0)
    assert all(torch.equal(whole[name], cut[name]) for name in cut)
    with pytest.raises(UsageError, match="1 trajectories have sampled ids"):
        head("late", [text(30, 12), text(12, 2)])


def test_a_head_of_other_hidden_states_is_not_gone_on_from(tmp_path: Path) -> None:
    """Its tensors have the same shapes: it was fed with other layers than it was made for, and nobody was told."""
    config = offline.new_config("eagle3", TARGET, "hash", DRAFT_VOCAB)
    assert config.taps == (1, 2, 3)
    sizes = {"intermediate_size": 40, "max_position_embeddings": 128}
    write_head(tmp_path / "same", "eagle3", **sizes)
    offline._check_start(tmp_path / "same", config, TARGET)
    write_head(tmp_path / "other", "eagle3", **sizes, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]})
    with pytest.raises(UsageError, match=r"has taps \(1, 2, 4\) and not \(1, 2, 3\); give --vocabulary as then"):
        offline._check_start(tmp_path / "other", config, TARGET)
    write_head(tmp_path / "mtp", "mtp", **sizes)
    with pytest.raises(UsageError, match="of the kind mtp, not eagle3; give --kind"):
        offline._check_start(tmp_path / "mtp", config, TARGET)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(5e3), Rope(5e5, LinearScaling(factor=8.0)),
        Rope(5e5, Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)),
        Rope(1e4, YarnScaling(factor=4.0, original_max_position_embeddings=64)),
    ],
)  # fmt: skip
def test_a_head_drafts_at_the_positions_that_it_was_trained_at(rope: Rope, tmp_path: Path) -> None:
    """The hub's way to say a scaling, beside `rope_theta`, was not handed on: the head drafted at other angles."""
    scaled = msgspec.structs.replace(TARGET, ropes=(rope,) * LAYERS)
    config = offline.new_config("eagle3", scaled, "hash", DRAFT_VOCAB)
    offline.write_head(tmp_path, config, fresh_weights(config, target().decoder.embedding_VD))
    assert load_head_config(tmp_path, "eagle3", scaled) == config
