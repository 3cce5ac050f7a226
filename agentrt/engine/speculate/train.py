"""Training a draft head from the policy's own forward pass.

The policy's hidden states and laws are detached: no gradient of a draft reaches the policy. The head is unrolled as it drafts
(the training-time test of EAGLE-3): at depth s a row takes the hidden state that the head itself made at depth s - 1, and
attends the rows with true features up to s places back, and its own chain since. The loss is the cross-entropy with the
policy's law at each depth, over ids that the policy sampled, and at depth s over chains that lie whole within one turn:
what a tool said is never drafted.

    loss = sum over depths s of DECAY^s * mean over rows of - sum_v p(v) log q_s(v)

Suffixes: B sequences, T ids, D the hidden size, F the hidden states of a row side by side, H heads, R dimensions of a head, N
rows that are wanted, L those of a depth, V ids of the target, W ids of the draft.
"""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from agentrt.engine.model.rope import rope_tables
from agentrt.engine.speculate.freshness import balance
from agentrt.engine.speculate.head_config import HeadConfig
from agentrt.engine.speculate.muon import Muon

DECAY = 0.8
"""Of the weight of each further depth."""
CLIP = 1.0
"""Of the gradient's norm."""
BETAS = (0.9, 0.95)
WARMUP = 20
"""Steps until the learning rate is whole."""

log = structlog.get_logger(__name__)


class Pass(NamedTuple):
    """What the policy's forward pass gave for some sequences, all of it detached."""

    token_ids_BT: Tensor
    is_sampled_BT: Tensor
    """Whether the policy sampled the id; false on prompts, tool results and padding."""
    hidden_BTF: Tensor
    """EAGLE-3: its hidden states at the head's taps; MTP: that of its last layer, after the final norm."""
    logits_BTV: Tensor
    embedding_VD: Tensor
    output_VD: Tensor
    """The output layer, which MTP uses."""


class Report(NamedTuple):
    """How a batch went."""

    loss: float
    overlaps: list[float]
    """By depth, the mean of sum_v min(p(v), q(v)): how often a drafted id can stand at best."""
    rows: list[int]
    """By depth, how many that mean is of: there are fewer the deeper it is, for chains end with turns."""


def policy_pass(
    token_ids_BT: Tensor, is_sampled_BT: Tensor, hidden_states: Sequence[Tensor], logits_BTV: Tensor,
    embedding_VD: Tensor, output_VD: Tensor, config: HeadConfig,
) -> Pass:  # fmt: skip
    """From the `hidden_states` (the embedding, then after each layer, the last one normed) and logits of transformers."""
    taken = [hidden_states[tap].detach() for tap in config.taps]
    return Pass(
        token_ids_BT, is_sampled_BT.bool(), torch.cat(taken, dim=-1).float(), logits_BTV.detach().float(),
        embedding_VD.detach().float(), output_VD.detach().float(),
    )  # fmt: skip


class DraftTrainer:
    """A head's weights and their optimizers: Muon for the layer's matrices, AdamW for the output layer and norms.

    A hook: `step` is called with what the policy's own update computed anyway.
    """

    def __init__(self, config: HeadConfig, weights: Mapping[str, Tensor], rate: float = 3e-3) -> None:
        self.config, self.rate = config, rate
        self.weights = {
            name: tensor.detach().float().clone().requires_grad_()
            for name, tensor in weights.items()
            if tensor.is_floating_point()
        }
        device = next(iter(self.weights.values())).device
        whole = torch.zeros(config.draft_vocab_size, dtype=torch.long, device=device)
        self.d2t = weights.get("d2t", whole).to(device)
        self._ids_W = torch.arange(config.draft_vocab_size, device=device) + self.d2t
        inner = [name for name, tensor in self.weights.items() if tensor.dim() == 2 and name != "lm_head.weight"]
        others = [tensor for name, tensor in self.weights.items() if name not in inner]
        self._optimizers = (
            Muon([self.weights[name] for name in inner], rate),
            torch.optim.AdamW(others, lr=rate, betas=BETAS, weight_decay=0.0),
        )
        self.steps, self.seconds = 0, 0.0
        """Updates until now, and what they took."""

    def step(self, given: Pass, depths: int) -> Report:
        """One update from the rows of one forward pass."""
        started = time.perf_counter()
        loss, report = self.loss(given, depths)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.weights.values(), CLIP)
        for optimizer in self._optimizers:
            optimizer.step()
        self.steps += 1
        self.seconds += time.perf_counter() - started
        return report

    def pace(self, step: int, steps: int) -> None:
        """Set the learning rate for this one of so many steps: it rises to the whole, and falls to a twentieth."""
        share = min((step + 1) / WARMUP, 1.0) * (1 - 0.95 * step / steps)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * share

    def is_due(self, before: float, now: float, tokens_to_come: int, step_seconds: float, steps: int) -> bool:
        """Whether `steps` more updates pay, each as long as those until now; both sides are logged.

        Accepted length before the policy changed and now, ids that the policy will sample until it changes again, and the
        seconds of an engine's step (`freshness.balance`).
        """
        found = balance(before, now, tokens_to_come, step_seconds, steps * self.seconds / max(self.steps, 1))
        log.info("refreshing the draft model", is_due=found.is_due, **found._asdict())
        return found.is_due

    def loss(self, given: Pass, depths: int) -> tuple[Tensor, Report]:
        """The loss over these depths, and what it is made of. Raises `ValueError` if the policy sampled none of the ids."""
        is_drafted_BT = F.pad(given.is_sampled_BT[:, 1:], (0, 1))
        if not is_drafted_BT.any():
            raise ValueError("none of these ids was sampled by the policy: there is nothing to learn from")
        p_NW = given.logits_BTV[is_drafted_BT].softmax(-1)[:, self._ids_W]
        is_last_N = torch.ones_like(p_NW[:, 0], dtype=torch.bool)
        total, overlaps, rows = p_NW.new_zeros(()), list[float](), list[int]()
        for depth, logits_NW in enumerate(unrolled(self.config, self.weights, given, is_drafted_BT, depths)):
            if depth:  # the ids of the chain were drafted too
                is_last_N = is_last_N & _later(given.is_sampled_BT, depth - 1)[is_drafted_BT]
            if not is_last_N.any():
                break
            p_LW, logq_LW = p_NW[is_last_N], logits_NW[is_last_N].log_softmax(-1)
            total = total - DECAY**depth * (p_LW * logq_LW).sum(-1).mean()
            overlaps.append(torch.minimum(p_LW, logq_LW.detach().exp()).sum(-1).mean().item())
            rows.append(len(p_LW))
        return total, Report(total.item(), overlaps, rows)

    def state(self) -> dict[str, Tensor]:
        """The weights by their published names, in float16, as a checkpoint and an update hold them."""
        found = {name: tensor.detach().half() for name, tensor in self.weights.items()}
        if self.config.draft_vocab_size < self.config.vocab_size:
            is_drafted_V = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=self._ids_W.device)
            is_drafted_V[self._ids_W] = True
            found |= {"d2t": self.d2t, "t2d": is_drafted_V}
        return found

    def update(self) -> dict[str, Tensor]:
        """The weights as part of an update of the policy: `engine.update_weights(version, {**policy, **update()})`."""
        return {f"draft.{name}": tensor for name, tensor in self.state().items() if tensor.is_floating_point()}


def unrolled(
    config: HeadConfig, weights: Mapping[str, Tensor], given: Pass, is_wanted_BT: Tensor, depths: int
) -> list[Tensor]:
    """At each depth `logits_NW` of the rows that are wanted: row j says id j + 1, from true features up to row j - depth.

    Of other rows only keys and values are computed, and that at the first depth; a chain needs no others.
    """
    cos_TR, sin_TR = rope_tables(config.rope, config.head_dim, given.token_ids_BT.shape[1])
    tables = cos_TR.to(given.hidden_BTF.device), sin_TR.to(given.hidden_BTF.device)
    embedded_BTD = given.embedding_VD[given.token_ids_BT]
    fused_BTD = F.linear(given.hidden_BTF, weights["fc.weight"]) if config.kind == "eagle3" else given.hidden_BTF
    features_BTD = _later(fused_BTD, 1)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    found, shape = [], given.token_ids_BT.shape
    for _ in range(depths):
        residual_BTD, x_BTE = _entered(config, weights, embedded_BTD, features_BTD)
        q, k, v = (
            F.linear(x_BTE, weights[f"{config.prefix}self_attn.{name}_proj.weight"]).view(*shape, -1, config.head_dim)
            for name in "qkv"
        )
        repeats = config.num_heads // config.num_kv_heads
        keys.append(_turned(k, tables).repeat_interleave(repeats, dim=2))
        values.append(v.repeat_interleave(repeats, dim=2))
        attended_BTD = _attended(_turned(q, tables), keys, values).flatten(2)
        residual_BTD = residual_BTD + F.linear(attended_BTD, weights[f"{config.prefix}self_attn.o_proj.weight"])
        hidden_ND = residual_BTD[is_wanted_BT]
        hidden_ND = hidden_ND + _mlp(config, weights, hidden_ND)
        found.append(_logits(config, weights, hidden_ND, given.output_VD))
        features_BTD = _later(torch.zeros_like(residual_BTD).masked_scatter(is_wanted_BT[..., None], hidden_ND), 1)
    return found


def _entered(
    config: HeadConfig, weights: Mapping[str, Tensor], embedded_BTD: Tensor, features_BTD: Tensor
) -> tuple[Tensor, Tensor]:
    """The residual, and what attention sees."""

    def norm(x_BTD: Tensor, name: str) -> Tensor:
        return _norm(config, x_BTD, weights[f"{config.prefix}{name}.weight"])

    if config.kind == "eagle3":
        both = (norm(embedded_BTD, "input_layernorm"), norm(features_BTD, "hidden_norm"))
        return features_BTD, torch.cat(both, dim=-1)
    both = (norm(embedded_BTD, "enorm"), norm(features_BTD, "hnorm"))
    residual_BTD = F.linear(torch.cat(both, dim=-1), weights[f"{config.prefix}eh_proj.weight"])
    return residual_BTD, norm(residual_BTD, "input_layernorm")


def _attended(q_BTHR: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Row j attends the first depth's rows up to j - s, and of each depth i up to its own, s, the row j - s + i."""
    last, length = len(keys) - 1, q_BTHR.shape[1]
    places_T = torch.arange(length, device=q_BTHR.device)
    is_hidden_TT = places_T > places_T[:, None] - last
    scale = q_BTHR.shape[-1] ** -0.5
    far_BHTT = torch.einsum("bthr,bshr->bhts", q_BTHR, keys[0]).masked_fill(is_hidden_TT, -torch.inf)
    near = [(q_BTHR * _later(key, last - depth)).sum(-1).transpose(1, 2) for depth, key in enumerate(keys) if depth]
    scores = torch.cat([far_BHTT, *(score_BHT[..., None] for score_BHT in near)], dim=-1) * scale
    weights = scores.nan_to_num(neginf=-1e9).softmax(-1)  # the first rows of a chain have nothing far to attend
    out_BTHR = torch.einsum("bhts,bshr->bthr", weights[..., :length], values[0])
    for depth, value in enumerate(values):
        if depth:
            share_BTH1 = weights[..., length + depth - 1].transpose(1, 2)[..., None]
            out_BTHR = out_BTHR + share_BTH1 * _later(value, last - depth)
    return out_BTHR


def _mlp(config: HeadConfig, weights: Mapping[str, Tensor], residual_ND: Tensor) -> Tensor:
    x_ND = _norm(config, residual_ND, weights[f"{config.prefix}post_attention_layernorm.weight"])
    gate, up = (F.linear(x_ND, weights[f"{config.prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return F.linear(F.silu(gate) * up, weights[f"{config.prefix}mlp.down_proj.weight"])


def _logits(config: HeadConfig, weights: Mapping[str, Tensor], hidden_ND: Tensor, output_VD: Tensor) -> Tensor:
    if config.kind == "eagle3":
        return F.linear(_norm(config, hidden_ND, weights["norm.weight"]), weights["lm_head.weight"])
    return F.linear(_norm(config, hidden_ND, weights[f"{config.prefix}shared_head.norm.weight"]), output_VD)


def _norm(config: HeadConfig, x_BTD: Tensor, weight_D: Tensor) -> Tensor:
    return F.rms_norm(x_BTD, weight_D.shape, weight_D, config.norm_eps)


def _turned(x_BTHR: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (table[:, None] for table in tables)
    first, second = x_BTHR.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _later(x_BT: Tensor, places: int) -> Tensor:
    """Everything `places` ids later; zeros before."""
    if not places:
        return x_BT
    moved = torch.zeros_like(x_BT)
    moved[:, places:] = x_BT[:, :-places]
    return moved


def fresh_weights(
    config: HeadConfig, embedding_VD: Tensor, ids_W: Tensor | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Weights to begin with: norms 1, the rest small; EAGLE-3's output layer is the policy's embedding of its ids."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in config.shapes().items()
    }
    if config.kind == "eagle3":
        ids_W = torch.arange(config.draft_vocab_size) if ids_W is None else ids_W
        weights["lm_head.weight"] = embedding_VD[ids_W].detach().float().clone()
        weights["d2t"] = ids_W - torch.arange(config.draft_vocab_size)
    return {name: tensor.to(embedding_VD.device) for name, tensor in weights.items()}
