"""What the priced KV policy makes of agent traffic, beside simple rules and published ones, on a simulated H200.

    python bench/kv_policy.py [--quick] [--json] [--episodes 1000] [--seeds 5] [--phi 0.8,1.5,2,4] [--pool 125000]

Every cell of oversubscription x link x host x model; the same episodes for each policy of a cell, told by the seed. The
ratio is episodes an hour of `priced` over the best baseline's, its mean over seeds with a 95 % interval. InferCept's rule is
given the durations of tools. `--pool` makes a smaller device (ids that fit): the same oversubscription with fewer live
episodes, for less work; `--quick` does that with 64 episodes, one seed and the eight corner cells of the 8B model.
"""

import argparse
import itertools
import math
import statistics
import sys

import msgspec

from agentrt.core.spec import KVPolicy
from agentrt.sim.cell import simulate
from agentrt.sim.spec import CellResult, SimSpec

BASELINES: tuple[KVPolicy, ...] = ("lru", "lru_drop", "ttl", "cache_ttl", "infercept")
PRICED: KVPolicy = "priced"
LINKS, HOSTS, MODELS = (50.0, 12.0), (4.0, 0.5), ("qwen3-8b", "qwen3-0.6b")
QUICK_POOL, QUICK_EPISODES, QUICK_PHI = 62_500, 64, (0.8, 4.0)
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""The 97.5 % point of Student's law, by the number of seeds."""


def interval(ratios: list[float]) -> float | None:
    """Half the width of the 95 % interval of their mean."""
    if len(ratios) < 2:
        return None
    return STUDENT.get(len(ratios), 1.96) * statistics.stdev(ratios) / math.sqrt(len(ratios))


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell's policies, side by side."""

    phi: float
    link: float
    host: float
    model: str
    policies: dict[str, list[CellResult]]
    episodes_per_hour: dict[str, float]
    best_baseline: str
    priced_over_best_baseline: float
    interval: float | None
    """Half the width of the 95 % interval; none for one seed."""


def measure(spec: SimSpec, seeds: int) -> Cell:
    """One cell: every policy under every seed, policies interleaved."""
    results: dict[str, list[CellResult]] = {policy: [] for policy in (PRICED, *BASELINES)}
    for seed, (policy, cells) in itertools.product(range(seeds), results.items()):
        cells.append(simulate(spec.with_(policy=policy, seed=seed)))
    speeds = {policy: statistics.fmean(one.episodes_per_hour for one in cells) for policy, cells in results.items()}
    best = max(BASELINES, key=lambda policy: speeds[policy])
    ratios = [
        ours.episodes_per_hour / theirs.episodes_per_hour
        for ours, theirs in zip(results[PRICED], results[best], strict=True)
    ]
    return Cell(
        phi=spec.phi, link=spec.link_gigabytes, host=spec.host_share, model=spec.model, policies=results,
        episodes_per_hour=speeds, best_baseline=best, priced_over_best_baseline=statistics.fmean(ratios),
        interval=interval(ratios),
    )  # fmt: skip


def main() -> None:
    """Measure, print, and optionally end with JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--phi", default="0.8,1.5,2,4")
    parser.add_argument("--pool", type=int)
    given = parser.parse_args()
    phis: list[float] = [float(one) for one in given.phi.split(",")]
    models, seeds = list(MODELS), given.seeds
    spec = SimSpec(episodes=given.episodes, pool_tokens=given.pool, page_size=128)
    if given.quick:
        phis, models, seeds = list(QUICK_PHI), models[:1], 1
        spec = spec.with_(episodes=QUICK_EPISODES, pool_tokens=QUICK_POOL)
    cells = []
    for phi, link, host, model in itertools.product(phis, LINKS, HOSTS, models):
        cell = measure(spec.with_(phi=phi, link_gigabytes=link, host_share=host, model=model), seeds)
        said = ", ".join(f"{name} {speed:,.0f}" for name, speed in cell.episodes_per_hour.items())
        spread = "" if cell.interval is None else f" +- {cell.interval:.3f}"
        ratio = f"x{cell.priced_over_best_baseline:.3f}{spread} of {cell.best_baseline}"
        print(f"phi {phi:g} link {link:g} GB/s host {host:g}x {model}: {said}; {ratio}", file=sys.stderr, flush=True)
        cells.append(cell)
    if given.json:
        print(msgspec.json.encode({"cells": cells}).decode())


if __name__ == "__main__":
    main()
