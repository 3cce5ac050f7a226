"""GRPO on two cores: sprout learns to use its calculator better, while episodes are sampled with the weights of the moment.

    python examples/grpo.py --seeds 0 1 2 -o outputs/grpo    # 150 steps each; what is there already is not done again
    python examples/grpo.py --int8 -o outputs/grpo           # sampled with weights and KV in int8

Each step takes 24 groups of 8 episodes, and takes one gradient step on
    - w_t * r_t * A,   r_t = exp(now_t - before_t),   w_t = min(exp(before_t - sampled_t), 2)
where `before` is the trainer's own logprob before the step (so r is 1, and stands for its gradient) and `sampled` the
recorded one, so w (TIS) makes up for a sampler that is a version behind. A is the reward above a baseline (`trees_of`;
GRPO's own with `--group-mean`). What the episodes of some groups have in common goes through the model once. The rate rises
for 10 steps and then falls to 0 in a line. The new weights go into the engine between two of its steps. Evaluation is on
other tasks, at the same temperature, apart from all counts.

A run is a folder in that of `-o`: all trajectories, `steps.jsonl`, a checkpoint. Beside it `table.md` and `curves.png` of
all runs that are there.
"""

import argparse
import math
import operator
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import msgspec
import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrt import Limits, RunSpec, SamplingParams, Task
from agentrt.core.models import find_model
from agentrt.core.spec import EngineSpec
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.local import local_engine
from agentrt.env import registry
from agentrt.env.chat.choose import renderer_for
from agentrt.rollout.account import Fate
from agentrt.rollout.group import Group
from agentrt.rollout.importance import ratio, token_weights
from agentrt.rollout.runtime import Runtime
from agentrt.rollout.setup import Setup
from agentrt.rollout.sink import RunFolder
from agentrt.rollout.tree import Tree, tree_of
from agentrt_envs import calculator

GROUP_SIZE, BATCH, EVAL_TASKS = 8, 24, 256
RATE, BETAS, WARMUP_STEPS, CAP, MAX_NORM = 2e-4, (0.9, 0.99), 10, 2.0, 1.0
SAVE_EVERY = 5
"""Steps."""
TREE_ROWS = 4 * GROUP_SIZE
"""Few large trees: a model's many small operations wait for the interpreter, which the engine uses too."""
PARTS = ("waiting", "training", "transfer", "evaluation")
"""Of the seconds of a step. Sampling goes on during the others, so waiting is what was not done yet."""
PHASES = ("queue", "prefill", "decode", "tools", "scoring")
"""Of an episode's time, summed over the episodes of a step; they run side by side."""
SWITCH_SECONDS = 0.0005
"""Of the interpreter between the trainer's thread, the engine's and the episodes'."""


class Clock:
    """Seconds of one step by what they were spent on."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - started


def trees_of(groups: list[Group], use_mean: bool) -> list[Tree]:
    """All rows, as trees. Their advantages are as recorded, or the rewards above the batch's baseline of least variance.

    b = sum(g * reward) / sum(g), g the square of the gradient of an episode's logprob: here the sum over its sampled
    tokens of (1 - p)^2, which is that of the token's own logit. This policy is sure of nearly all it says, so a failure
    has 20 to 60 times the g of a success. GRPO's baseline, the group's mean, lets the noise of a few failures drown the
    rest: the signs of the gradient of 200 episodes correlate with those of the exact one by 0.05 with it, by 0.12 with b.
    """
    rows = [row for group in groups for row in group.rows()]
    if not use_mean:
        rewards = [group.record.rewards[row.member] or 0.0 for group in groups for row in group.rows()]
        squares = [sum((1 - math.exp(p)) ** 2 for p in compress(row.logprobs, row.mask)) for row in rows]
        baseline = sum(map(operator.mul, squares, rewards)) / (sum(squares) or 1.0)
        rows = [row._replace(advantage=reward - baseline) for row, reward in zip(rows, rewards, strict=True)]
    return [tree_of(rows[at : at + TREE_ROWS]) for at in range(0, len(rows), TREE_ROWS)]


class Trainer:
    """The policy, its optimizer, and where both are kept."""

    def __init__(self, source: Path, folder: Path, steps: int, use_tis: bool, use_mean: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0)
        self.path, self.steps, self.step = folder / "checkpoint.pt", steps, 0
        self.use_tis, self.use_mean = use_tis, use_mean
        if self.path.exists():
            state = torch.load(self.path)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    def logprobs(self, tree: Tree) -> Tensor:
        """log p of each sampled token of a group's rows: shape (S,)."""
        logits_NV = self.model(
            torch.from_numpy(tree.token_ids_N)[None],
            attention_mask=torch.from_numpy(tree.attends_NN)[None, None],
            position_ids=torch.from_numpy(tree.positions_N)[None],
            use_cache=False,
        ).logits[0]
        logprobs_SV: Tensor = logits_NV.log_softmax(-1)[tree.before_S]
        return logprobs_SV.gather(1, torch.from_numpy(tree.sampled_S)[:, None])[:, 0]

    def learn(self, groups: list[Group]) -> dict[str, float]:
        """One gradient step on all rows of some groups."""
        trees = trees_of(groups, self.use_mean)
        count, far, distance = sum(len(tree.sampled_S) for tree in trees), 0.0, 0.0
        self.optimizer.zero_grad()
        for tree in trees:
            sampled_S, advantages_S = torch.from_numpy(tree.logprobs_S), torch.from_numpy(tree.advantages_S)
            now_S = self.logprobs(tree)
            before_S = now_S.detach()  # one step a batch: the proximal policy is the present one
            weights_S = token_weights(before_S, sampled_S, CAP) if self.use_tis else torch.ones_like(before_S)
            gain_S = weights_S * (now_S - before_S).exp() * advantages_S
            torch.autograd.backward(-gain_S.sum() / count)
            distance += float((before_S - sampled_S).abs().sum())
            far = max(far, float(ratio(before_S, sampled_S).max()))
        self.optimizer.param_groups[0]["lr"] = RATE * min((self.step + 1) / WARMUP_STEPS, 1 - self.step / self.steps)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.step += 1
        return {"mean_difference": distance / count, "max_ratio": far, "gradient_norm": float(norm), "tokens": count}

    def save(self) -> None:
        draft = self.path.with_suffix(".new")
        torch.save(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}, draft
        )
        draft.replace(self.path)


async def train(options: argparse.Namespace, spec: RunSpec, folder: RunFolder) -> None:
    """From the checkpoint, or the beginning, to the last step."""
    source = find_model(spec.model)
    tokenizer = Tokenizer.load(source)
    setup = Setup(
        environment=registry.load(spec.environment), engine=local_engine(source, tokenizer, spec.engine),
        renderer=renderer_for(source, tokenizer), spec=spec,
    )  # fmt: skip
    trainer = Trainer(source, folder.path, options.steps, not options.no_tis, options.group_mean)
    log = StepLog(folder.path, trainer.step)
    async with Runtime(setup, folder, max_concurrent=spec.max_concurrent) as runtime:
        if trainer.step:
            await runtime.update_weights(trainer.step, trainer.model.state_dict())
        else:
            log.add({"step": 0, "eval": await evaluate(runtime)})
        tasks = tasks_from(spec.seed, trainer.step)
        rollouts = runtime.rollouts(
            tasks, group_size=GROUP_SIZE, batch=BATCH, max_staleness=options.max_staleness,
            keep_equal=not options.group_mean,
        )  # fmt: skip
        while trainer.step < options.steps:
            started, clock, line = time.perf_counter(), Clock(), dict[str, Any]()
            with clock.measure("waiting"):
                groups = [await anext(rollouts) for _ in range(BATCH)]
            with clock.measure("training"):
                learned = await anyio.to_thread.run_sync(trainer.learn, groups)
            with clock.measure("transfer"):
                report = await runtime.update_weights(trainer.step, trainer.model.state_dict(), options.mode)
            if trainer.step % options.eval_every == 0 or trainer.step == options.steps:
                with clock.measure("evaluation"):
                    line["eval"] = await evaluate(runtime)
            if "eval" in line or trainer.step % SAVE_EVERY == 0:
                trainer.save()
            episodes = [one for group in groups for one in group.episodes]
            log.add(
                {"step": trainer.step, "reward": fmean(one.reward or 0.0 for one in episodes), **line}
                | {"seconds": time.perf_counter() - started, **clock.seconds, **learned, "pause": report.pause_seconds}
                | {name: sum(one.timing[name] for one in episodes) for name in PHASES}
                | {"filtered": rollouts.account.groups[Fate.FILTERED], "stale": rollouts.account.episodes[Fate.STALE]}
            )


async def evaluate(runtime: Runtime) -> float:
    """Mean reward on held-out tasks, at the temperature of training."""
    episodes = await runtime.evaluate([calculator.task("eval", index) for index in range(EVAL_TASKS)])
    return fmean(one.reward or 0.0 for one in episodes)


async def tasks_from(seed: int, step: int) -> AsyncIterator[Task]:
    """Endless training tasks, another stretch of them for each seed and step from which it is resumed."""
    index = seed * 1_000_000 + step * 100
    while True:
        yield calculator.task("train", index)
        index += 1


class StepLog:
    """`steps.jsonl`. Lines after the checkpoint that is resumed from are dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / "steps.jsonl"
        kept = [line for line in read_steps(folder) if line["step"] <= step] if step else []
        self.path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in kept))

    def add(self, line: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        shown = ("reward", "eval", "seconds", *PARTS, "mean_difference", "max_ratio")
        print(f"step {line['step']}:", *(f"{name} {line[name]:.4g}" for name in shown if name in line), flush=True)


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `steps.jsonl`; none if it has not begun."""
    path = folder / "steps.jsonl"
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def report(output: Path) -> None:
    """Write `table.md` and `curves.png` of all runs in a folder that have taken a step, and print the table."""
    runs = {path.parent.name: read_steps(path.parent) for path in sorted(output.glob("*/steps.jsonl"))}
    runs = {name: lines for name, lines in runs.items() if len(lines) > 1}
    if not runs:
        return
    text = table(runs)
    (output / "table.md").write_text(text)
    draw(runs).savefig(output / "curves.png", dpi=150)
    print(text)


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """What each run reached, and what its time went to."""
    outcome = ["| run | steps | minutes | eval at the start | best | at the end |", "|---|---|---|---|---|---|"]
    spent = ["| seconds of a step | whole | " + " | ".join(PARTS) + " |", "|---" * (len(PARTS) + 2) + "|"]
    side = ["| of the episodes' time, % | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for name, lines in runs.items():
        evals, steps = [one["eval"] for one in lines if "eval" in one], lines[1:]
        minutes = sum(one["seconds"] for one in steps) / 60
        outcome.append(
            f"| {name} | {len(steps)} | {minutes:.1f} | {evals[0]:.3f} | {max(evals):.3f} | {evals[-1]:.3f} |"
        )
        means = [fmean(one[part] for one in steps) for part in ("seconds", *PARTS)]
        spent.append(f"| {name} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
        totals = [sum(one[phase] for one in steps) for phase in PHASES]
        side.append(f"| {name} | " + " | ".join(f"{100 * total / sum(totals):.1f}" for total in totals) + " |")
    return "\n".join([*outcome, "", *spent, "", *side, ""])


def draw(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """Eval reward over steps, and thinly the reward of the training batches."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, lines in runs.items():
        trained, tested = lines[1:], [one for one in lines if "eval" in one]
        (curve,) = axes.plot([one["step"] for one in tested], [one["eval"] for one in tested], "o-", label=name)
        rewards = [one["reward"] for one in trained]
        axes.plot([one["step"] for one in trained], rewards, color=curve.get_color(), linewidth=0.4)
    axes.set(xlabel="gradient steps", ylabel="mean reward", ylim=(0.5, 1.0))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on sprout.")
    parser.add_argument("-o", "--output", type=Path, default=Path("outputs/grpo"), help="a folder of runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a run each, one after another")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--eval-every", type=int, default=25)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--mode", choices=["recompute", "keep", "drain", "abort_resume"], default="recompute")
    parser.add_argument("--int8", action="store_true", help="sample with weights and KV in int8")
    parser.add_argument("--no-tis", action="store_true", help="no weights for the sampler being another policy")
    parser.add_argument(
        "--group-mean", action="store_true", help="GRPO's own advantages, and no groups of equal rewards"
    )
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_SECONDS)
    torch.set_num_threads(1)  # one core for the trainer, one for the engine
    for seed in options.seeds:
        spec = RunSpec(
            environment="calculator", seed=seed, group_size=GROUP_SIZE, groups=BATCH,
            sampling=SamplingParams(temperature=1.0), limits=Limits(max_turns=6, max_turn_tokens=48),
            engine=EngineSpec(weights="int8", kv="int8") if options.int8 else EngineSpec(),
        )  # fmt: skip
        variant = "-int8" * options.int8 + "-no-tis" * options.no_tis + "-mean" * options.group_mean
        path = options.output / f"seed-{seed}{variant}"
        is_new = not (path / "run.toml").exists()
        with RunFolder.create(path, spec, {}) if is_new else RunFolder.resume(path) as folder:
            anyio.run(train, options, spec, folder)
    report(options.output)


if __name__ == "__main__":
    main()
