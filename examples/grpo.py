"""GRPO on two cores: sprout learns to use its calculator better, while episodes are sampled with the weights of the moment.

    python examples/grpo.py -o outputs/grpo                  # 150 steps; what is there already is not done again
    python examples/grpo.py -o outputs/short --steps 5 --eval-every 5

Each step takes 8 groups of 8 episodes, computes group advantages, and takes one gradient step on
    - w_t * min(r_t * A, clip(r_t, 1 - e, 1 + e) * A),   r_t = exp(now_t - before_t),   w_t = min(exp(before_t - sampled_t), 2)
where `before` is the trainer's own logprob before the step and `sampled` the recorded one, so w (TIS) makes up for a sampler
that is a version behind. The new weights go into the engine between two of its steps. Evaluation is on other tasks, apart
from all counts. Left in the folder: the run with all trajectories, `steps.jsonl`, `table.md`, `curves.svg`, a checkpoint.
"""

import argparse
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrt import Limits, RunSpec, SamplingParams, Task
from agentrt.core.models import find_model
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.local import local_engine
from agentrt.env import registry
from agentrt.env.chat.choose import renderer_for
from agentrt.rollout.account import Fate
from agentrt.rollout.batch import Padded, padded
from agentrt.rollout.group import Group
from agentrt.rollout.importance import ratio, token_weights
from agentrt.rollout.runtime import Runtime
from agentrt.rollout.setup import Setup
from agentrt.rollout.sink import RunFolder
from agentrt_envs import calculator

GROUP_SIZE, BATCH, EVAL_TASKS = 8, 8, 128
RATE, CLIP, CAP, MAX_NORM = 1e-4, 0.2, 2.0, 1.0
ROWS_AT_ONCE = 32
PHASES = ("queue", "prefill", "decode", "tools", "scoring")
"""Of an episode's time, summed over the episodes of a step; they run side by side."""
SHOWN = ("reward", "eval", "seconds", "waiting", "training", "transfer", "mean_difference", "max_ratio")


class Clock:
    """Seconds of one step by what they were spent on; sampling goes on while others run."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("waiting", "training", "transfer"), 0.0)

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - started


class Trainer:
    """The policy, its optimizer, and where both are kept."""

    def __init__(self, source: Path, folder: Path, use_tis: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0)
        self.path, self.use_tis, self.step = folder / "checkpoint.pt", use_tis, 0
        if self.path.exists():
            state = torch.load(self.path)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    def logprobs(self, batch: Padded, rows: slice) -> Tensor:
        """log p of every id but the first, given those before it: shape (rows, T - 1)."""
        ids_RT = torch.from_numpy(batch.token_ids_RT[rows])
        attention_RT = torch.from_numpy(batch.is_token_RT[rows]).long()
        logits_RTV = self.model(ids_RT[:, :-1], attention_mask=attention_RT[:, :-1]).logits
        return logits_RTV.log_softmax(-1).gather(2, ids_RT[:, 1:, None])[..., 0]

    def learn(self, groups: list[Group]) -> dict[str, float]:
        """One gradient step on all rows of some groups."""
        batch = padded([row for group in groups for row in group.rows()])
        count, far, distance = int(batch.mask_RT.sum()), 0.0, 0.0
        self.optimizer.zero_grad()
        for start in range(0, len(batch.advantages_R), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            mask_RT = torch.from_numpy(batch.mask_RT[rows, 1:]).float()
            sampled_RT = torch.from_numpy(batch.logprobs_RT[rows, 1:])
            advantages_R1 = torch.from_numpy(batch.advantages_R[rows])[:, None]
            now_RT = self.logprobs(batch, rows)
            before_RT = now_RT.detach()  # one step a batch: the proximal policy is the present one
            weights_RT = token_weights(before_RT, sampled_RT, CAP) if self.use_tis else torch.ones_like(before_RT)
            ratio_RT = (now_RT - before_RT).exp()
            gain_RT = torch.minimum(ratio_RT * advantages_R1, ratio_RT.clip(1 - CLIP, 1 + CLIP) * advantages_R1)
            torch.autograd.backward(-(weights_RT * gain_RT * mask_RT).sum() / count)
            distance += float(((before_RT - sampled_RT).abs() * mask_RT).sum())
            far = max(far, float((ratio(before_RT, sampled_RT) * mask_RT).max()))
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
    environment = registry.load(spec.environment)
    setup = Setup(
        environment=environment, engine=local_engine(source, tokenizer, spec.engine),
        renderer=renderer_for(source, tokenizer), spec=spec,
    )  # fmt: skip
    trainer = Trainer(source, folder.path, use_tis=not options.no_tis)
    log = StepLog(folder.path, trainer.step)
    async with Runtime(setup, folder, max_concurrent=spec.max_concurrent) as runtime:
        if trainer.step:
            await runtime.update_weights(trainer.step, trainer.model.state_dict())
        else:
            log.add({"step": 0, "eval": await evaluate(runtime)})
        tasks = tasks_from(spec.seed, trainer.step)
        rollouts = runtime.rollouts(tasks, group_size=GROUP_SIZE, batch=BATCH, max_staleness=options.max_staleness)
        while trainer.step < options.steps:
            started, clock = time.perf_counter(), Clock()
            with clock.measure("waiting"):
                groups = [await anext(rollouts) for _ in range(BATCH)]
            with clock.measure("training"):
                learned = await anyio.to_thread.run_sync(trainer.learn, groups)
            with clock.measure("transfer"):
                report = await runtime.update_weights(trainer.step, trainer.model.state_dict(), options.mode)
            episodes = [one for group in groups for one in group.episodes]
            line: dict[str, Any] = {
                "step": trainer.step,
                "seconds": time.perf_counter() - started,
                **clock.seconds,
                **learned,
            }
            line |= {
                "reward": sum(one.reward or 0 for one in episodes) / len(episodes),
                "pause": report.pause_seconds,
                "filtered": rollouts.account.groups[Fate.FILTERED],
                "stale": rollouts.account.episodes[Fate.STALE],
                **{
                    name: sum(one.timing[name] for one in episodes)
                    for name in ("queue", "prefill", "decode", "tools", "scoring")
                },
            }
            if trainer.step % options.eval_every == 0 or trainer.step == options.steps:
                line["eval"] = await evaluate(runtime)
                trainer.save()
            log.add(line)
    log.finish()


async def evaluate(runtime: Runtime) -> float:
    """Mean reward on held-out tasks, at the temperature of training."""
    episodes = await runtime.evaluate([calculator.task("eval", index) for index in range(EVAL_TASKS)])
    return sum(one.reward or 0.0 for one in episodes) / len(episodes)


async def tasks_from(seed: int, step: int) -> AsyncIterator[Task]:
    """Endless training tasks, another stretch of them for each seed and step from which it is resumed."""
    index = seed * 1_000_000 + step * 100
    while True:
        yield calculator.task("train", index)
        index += 1


class StepLog:
    """`steps.jsonl`, and what is drawn from it. Lines after the checkpoint that is resumed from are dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.path = folder, folder / "steps.jsonl"
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        self.lines: list[dict[str, Any]] = [one for one in map(msgspec.json.decode, lines) if one["step"] <= step]
        if not step:
            self.lines = []
        self.path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in self.lines))

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        shown = {
            name: round(value, 4)
            for name, value in line.items()
            if name in ("reward", "eval", "seconds", "waiting", "training", "transfer", "mean_difference", "max_ratio")
        }
        print(f"step {line['step']}: {shown}", flush=True)

    def finish(self) -> None:
        evaluations = [(one["step"], one["eval"]) for one in self.lines if "eval" in one]
        rows = [f"| {step} | {value:.3f} |" for step, value in evaluations]
        steps = [one for one in self.lines if "seconds" in one]
        parts = ("waiting", "training", "transfer")
        mean = {name: sum(one[name] for one in steps) / max(1, len(steps)) for name in ("seconds", *parts)}
        split = ", ".join(f"{name} {mean[name]:.2f} s" for name in parts)
        table = "\n".join(
            ["| step | eval reward |", "|---|---|", *rows, "", f"A step took {mean['seconds']:.2f} s: {split}.", ""]
        )
        (self.folder / "table.md").write_text(table)
        (self.folder / "curves.svg").write_text(curves([(one["step"], one["reward"]) for one in steps], evaluations))
        print(table)


def curves(rewards: list[tuple[int, float]], evaluations: list[tuple[int, float]]) -> str:
    """Training and eval reward over steps, as an SVG of its own."""
    last = max([step for step, _ in [*rewards, *evaluations]], default=1) or 1

    def line(points: list[tuple[int, float]], color: str, width: float) -> str:
        path = " ".join(f"{50 + 540 * step / last:.1f},{280 - 250 * value:.1f}" for step, value in points)
        return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'

    grid = "".join(
        f'<text x="8" y="{284 - 250 * tick / 4:.0f}">{tick / 4:.2f}</text>'
        f'<line x1="50" x2="590" y1="{280 - 250 * tick / 4:.0f}" y2="{280 - 250 * tick / 4:.0f}" stroke="#ddd"/>'
        for tick in range(5)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 310" font-family="sans-serif" font-size="12">'
        f'<rect width="600" height="310" fill="white"/>{grid}{line(rewards, "#9bb", 1)}{line(evaluations, "#c40", 2)}'
        f'<text x="50" y="302">step 0</text><text x="550" y="302">{last}</text>'
        '<text x="380" y="20" fill="#c40">eval</text><text x="430" y="20" fill="#577">training batch</text></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on sprout.")
    parser.add_argument("-o", "--output", type=Path, default=Path("outputs/grpo"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--eval-every", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--mode", choices=["recompute", "keep", "drain", "abort_resume"], default="recompute")
    parser.add_argument("--no-tis", action="store_true", help="no weights for the sampler being another policy")
    options = parser.parse_args()
    torch.set_num_threads(2)
    spec = RunSpec(
        environment="calculator", seed=options.seed, group_size=GROUP_SIZE, groups=BATCH,
        sampling=SamplingParams(temperature=1.0), limits=Limits(max_turns=6, max_turn_tokens=48),
    )  # fmt: skip
    is_new = not (options.output / "run.toml").exists()
    with RunFolder.create(options.output, spec, {}) if is_new else RunFolder.resume(options.output) as folder:
        anyio.run(train, options, spec, folder)


if __name__ == "__main__":
    main()
