"""Training a draft head on recorded text: the policy reads it again, and the head learns what the policy would have said.

One text in `HELD_OUT` is kept out, to see at the end how much of the draft would stand there.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentrt.core.errors import UsageError
from agentrt.core.tokens import IntArray
from agentrt.engine.model.config import ModelConfig, load_config
from agentrt.engine.model.decoder import Decoder, PagedKV
from agentrt.engine.model.loader import hash_weights, read_weights
from agentrt.engine.model.rope import rope_parameters
from agentrt.engine.speculate.head_config import ENDINGS, HeadConfig, Kind, kind_of, load_head_config
from agentrt.engine.speculate.load import read_head
from agentrt.engine.speculate.train import DraftTrainer, Pass, Report, fresh_weights

HELD_OUT = 10
BATCH_TOKENS = 1024
LONGEST = 4096
"""Ids of a text that are learnt from, the first ones: memory grows with their square."""
PAGE_SIZE = 64
DEEP = 12
"""Layers from which on EAGLE-3's own choice of hidden states is taken."""


class Text(NamedTuple):
    """One branch of an episode."""

    token_ids: IntArray
    mask: IntArray
    """1 exactly on what the policy sampled."""

    def begun(self, count: int) -> "Text":
        """The first so many ids of it."""
        return Text(self.token_ids[:count], self.mask[:count])


class Policy(NamedTuple):
    """The model to draft for."""

    decoder: Decoder
    output_VD: Tensor
    """Its output layer, as it was before it was packed."""


class Outcome(NamedTuple):
    """What training came to."""

    texts: int
    held_out: int
    num_cut: int
    """Of both: texts longer than `LONGEST`."""
    steps: int
    seconds: float
    before: list[float]
    """On text that was kept out, by depth: how often a drafted id can stand at best, before and after."""
    after: list[float]


def new_config(kind: Kind, target: ModelConfig, target_hash: str, draft_vocab_size: int) -> HeadConfig:
    """A head of the target's own sizes."""
    layers, rope = target.num_layers, target.ropes[0]
    if rope is None or target.embedding_scale != 1:
        raise UsageError(
            f"no draft head can be trained for {target.architecture} yet; draft with a small model instead"
        )
    taps = (2, layers // 2, layers - 3) if layers >= DEEP else tuple(sorted({1, layers // 2, max(layers - 1, 1)}))
    return HeadConfig(
        kind=kind, hidden_size=target.hidden_size, intermediate_size=target.intermediate_size, num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads, head_dim=target.head_dim, context_length=target.context_length,
        norm_eps=target.norm_eps, rope=rope, vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size if kind == "eagle3" else target.vocab_size,
        taps=taps if kind == "eagle3" else (layers,), target=target_hash,
    )  # fmt: skip


def write_head(folder: Path, config: HeadConfig, weights: dict[str, Tensor]) -> None:
    """A folder that `engine.draft` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    ending = next(ending for ending, kind in ENDINGS.items() if kind == config.kind)
    keys = {
        "architectures": [f"LlamaForCausalLM{ending}"], "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": 1, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length, "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_parameters(config.rope),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(config.taps)}, "agentrt_target": config.target,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def train_head(
    model: Path, texts: Sequence[Text], folder: Path, kind: Kind, *, steps: int, depths: int, vocabulary: int,
    start: Path | None = None, seed: int = 0, progress: Callable[[int, Report], None] = lambda step, report: None,
) -> Outcome:  # fmt: skip
    """Train a head for the model in one folder on these texts, and write it to another.

    EAGLE-3 drafts the `vocabulary` ids that the policy said most often. `start` is a head of the same sizes to go on from.
    Of a text the first `LONGEST` ids are read.
    `UsageError` if there is nothing to learn from.
    """
    target = load_config(model)
    told = [text for text in texts if 1 in text.mask[1:LONGEST]]
    kept, learnt = told[::HELD_OUT], [text for index, text in enumerate(told) if index % HELD_OUT]
    if not learnt:
        raise UsageError(f"{len(told)} trajectories have sampled ids; training a draft takes 2 at least")
    _check_fits(told, target)
    kept, learnt = ([text.begun(LONGEST) for text in some] for some in (kept, learnt))
    stored = read_weights(model, target)
    config = new_config(kind, target, hash_weights(stored), min(vocabulary, target.vocab_size))
    if start:
        _check_start(start, config, target)
    policy = policy_of(target, stored)
    ids_W = _most_frequent(learnt, config.draft_vocab_size, config.vocab_size)
    weights = read_head(start, config) if start else fresh_weights(config, policy.decoder.embedding_VD, ids_W, seed)
    trainer, started = DraftTrainer(config, weights), time.perf_counter()
    before = overlaps(trainer, policy, kept, depths)
    learning = batches(learnt, random.Random(seed))
    for step in range(steps):
        trainer.pace(step, steps)
        progress(step, trainer.step(read_by(policy, next(learning), config), depths))
    after = overlaps(trainer, policy, kept, depths)
    write_head(folder, config, trainer.state())
    num_cut = sum(len(text.token_ids) > LONGEST for text in told)
    return Outcome(len(learnt), len(kept), num_cut, steps, time.perf_counter() - started, before, after)


def _check_fits(texts: Sequence[Text], target: ModelConfig) -> None:
    longest, top = max(len(text.token_ids) for text in texts), max(max(text.token_ids) for text in texts)
    if longest > target.context_length or top >= target.vocab_size:
        raise UsageError(
            f"the trajectories hold {longest} ids in a row and id {top}, and the model has a context of "
            f"{target.context_length} and {target.vocab_size} ids; give --model the one that sampled them"
        )


def _check_start(start: Path, config: HeadConfig, target: ModelConfig) -> None:
    """Raise `UsageError` for a head that would go on from other hidden states, positions or sizes than it was made for."""
    if (kind := kind_of(start)) != config.kind:
        raise UsageError(
            f"{start} holds a draft of the kind {kind or 'small'}, not {config.kind}; give --kind, or start anew"
        )
    found = load_head_config(start, config.kind, target)
    names = [name for name in HeadConfig.__struct_fields__ if name not in ("target", "context_length")]
    if differing := [name for name in names if getattr(found, name) != getattr(config, name)]:
        said = ", ".join(f"{name} {getattr(found, name)} and not {getattr(config, name)}" for name in differing)
        raise UsageError(f"{start} has {said}; give --vocabulary as then, or start anew")


def policy_of(config: ModelConfig, stored: Mapping[str, Tensor]) -> Policy:
    """The policy of these weights."""
    weights = {name: tensor.to(torch.float32, copy=True) for name, tensor in stored.items()}
    output = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    return Policy(Decoder(config, weights), weights[output])


def read_by(policy: Policy, texts: Sequence[Text], config: HeadConfig) -> Pass:
    """The policy's forward pass over these texts, filled up to equal length."""
    decoder, lengths = policy.decoder, [len(text.token_ids) for text in texts]
    places = -(-max(lengths) // PAGE_SIZE)
    tables_SP = torch.arange(len(texts) * places, dtype=torch.int32).view(len(texts), places)
    kv = [PagedKV(torch.zeros(tables_SP.numel() * one.page_stride), one) for one in decoder.page_layouts(PAGE_SIZE)]
    taps: dict[int, Tensor | None] = dict.fromkeys(config.taps)
    logits_NV = decoder.forward(
        torch.cat([torch.tensor(text.token_ids) for text in texts]).long(),
        torch.cat([torch.arange(length) for length in lengths]),
        torch.repeat_interleave(torch.arange(len(texts), dtype=torch.int32), torch.tensor(lengths)),
        tables_SP.expand(len(kv), -1, -1).contiguous(), kv, torch.arange(sum(lengths)), taps=taps,
    )  # fmt: skip
    hidden_NF = torch.cat([hidden_ND for hidden_ND in taps.values() if hidden_ND is not None], dim=1)
    if config.kind == "mtp":
        hidden_NF = decoder.ops.rms_norm(hidden_NF, decoder.norm_D, decoder.config.norm_eps)

    def filled(rows_N: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(torch.split(rows_N, lengths)), batch_first=True)

    token_ids_N = torch.cat([torch.tensor(text.token_ids) for text in texts]).long()
    mask_N = torch.cat([torch.tensor(text.mask, dtype=torch.bool) for text in texts])
    return Pass(
        filled(token_ids_N),
        filled(mask_N),
        filled(hidden_NF),
        filled(logits_NV),
        decoder.embedding_VD,
        policy.output_VD,
    )


@torch.no_grad()
def overlaps(trainer: DraftTrainer, policy: Policy, texts: Sequence[Text], depths: int) -> list[float]:
    """By depth, the mean overlap of the head's law with the policy's, over these texts, as deep as their turns are."""
    sums, rows = [0.0] * depths, [0] * depths
    for batch in _cut(sorted(texts, key=lambda text: len(text.token_ids))):
        _, report = trainer.loss(read_by(policy, batch, trainer.config), depths)
        for depth, (overlap, count) in enumerate(zip(report.overlaps, report.rows, strict=True)):
            sums[depth] += overlap * count
            rows[depth] += count
    return [total / count for total, count in zip(sums, rows, strict=True) if count]


def _most_frequent(texts: Sequence[Text], count: int, vocab_size: int) -> Tensor:
    """The ids sampled most often, in ascending order; filled up with the lowest others."""
    said = Counter(token_id for text in texts for token_id, bit in zip(text.token_ids, text.mask, strict=True) if bit)
    ranked = sorted(range(vocab_size), key=lambda token_id: (-said[token_id], token_id))
    return torch.tensor(sorted(ranked[:count]))


def batches(texts: Sequence[Text], rng: random.Random) -> Iterator[list[Text]]:
    """Without end: texts of like length together, in another order each time."""
    while True:
        cut = list(_cut(sorted(texts, key=lambda text: (len(text.token_ids), rng.random()))))
        rng.shuffle(cut)
        yield from cut


def _cut(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Neighbours, as many as `BATCH_TOKENS` hold when they are filled up to equal length."""
    batch: list[Text] = []
    for text in texts:
        longest = max(len(one.token_ids) for one in [*batch, text])
        if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch
