"""What the priced KV policy makes of agent traffic, beside simple rules and published ones, on a simulated H200.

    python bench/kv_policy.py [--quick] [--json] [--episodes 1000] [--seeds 5] [--phi 0.8,1.5,2,4] [--pool 125000]
                              [--policies priced,lru,infercept] [--corners 50:4,12:0.5] [--caps 1.25,1.5,2] [--orders]
                              [--results FILE] [--seconds S] [--svg FILE]

Every cell of oversubscription x link x host x model; the same episodes for each policy of a cell, told by the seed. The
ratio is episodes an hour of `priced` over the best baseline's, its mean over seeds with a 95 % interval. InferCept's rule is
given the durations of tools. LRU, with and without a host, is also taken with its best cap on live episodes: the best of its
runs at this oversubscription and at those of `--caps` below. `unlimited`, a device that everything fits, is a bound.

Beside it stands the ratio of sampled ids a second until the last episode began (`full`): what a short run says of a long
one, for at the end of a run, when fewer and fewer are alive, no policy has anything to decide.

`--results` appends every run to a file and takes from it what is there, so a long table can be made in pieces
(`kv_policy.jsonl` beside this file has what there is of 1,000 episodes); `--seconds` ends a piece, `--corners` (link:host)
chooses cells. `--pool` makes a smaller device (ids that fit): the same oversubscription with fewer live episodes. `--orders`
compares the orders of service where most is asked of the pool. `--quick`: 200 episodes, one seed, the 8B model on 125,000
ids, the two extreme cells at the largest oversubscription, and the baselines that were ever the best one.
"""

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec

from agentrt.core.spec import ServiceOrder
from agentrt.sim.cell import simulate
from agentrt.sim.plot import Series, svg
from agentrt.sim.spec import CellResult, SimPolicy, SimSpec

BASELINES: tuple[SimPolicy, ...] = ("lru", "lru_drop", "ttl", "cache_ttl", "infercept")
CAPPED: tuple[SimPolicy, ...] = ("lru", "lru_drop")
CAPS, QUICK_CAPS = "1.25,1.5,2", "1.25"
"""On live episodes, as oversubscription."""
HOSTLESS: tuple[SimPolicy, ...] = ("lru_drop", "unlimited")
"""One run for all links and hosts."""
POLICIES: tuple[SimPolicy, ...] = ("priced", *BASELINES, "unlimited")
LINKS, HOSTS, MODELS = (50.0, 12.0), (4.0, 0.5), ("qwen3-8b", "qwen3-0.6b")
CORNERS = ",".join(f"{link:g}:{host:g}" for link, host in itertools.product(LINKS, HOSTS))
QUICK_EPISODES, QUICK_POOL, QUICK_PHI, QUICK_CORNERS = 200, 125_000, "4", "50:4,12:0.5"
QUICK_POLICIES: tuple[SimPolicy, ...] = ("priced", "lru", "infercept")
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""The 97.5 % point of Student's law, by the number of seeds."""


class Run(msgspec.Struct, frozen=True):
    """One simulation."""

    spec: SimSpec
    result: CellResult


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell's policies, side by side."""

    phi: float
    link: float
    host: float
    model: str
    seeds: int
    policies: dict[str, CellResult]
    """Of the first seed."""
    episodes_per_hour: dict[str, float]
    """Means over seeds; NAME@cap is with the best cap on live episodes."""
    orders: dict[str, CellResult]
    """`priced` under each order of service, of the first seed: what it makes of the time to a ready group."""
    best_baseline: str
    priced_over_best_baseline: float
    interval: float | None
    """Half the width of the 95 % interval; none for one seed."""
    full_ids_per_second: dict[str, float]
    """Means over seeds."""
    full_over_best_baseline: float
    """`priced` over the best baseline by that measure."""


class OutOfTimeError(Exception):
    """There is no time left for another run."""


class Results:
    """The runs there are, in memory and in a file."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self._path, self._until = path, time.monotonic() + seconds
        lines = path.read_bytes().splitlines() if path is not None and path.exists() else []
        self._runs = {run.spec: run.result for run in (msgspec.json.decode(line, type=Run) for line in lines)}

    def get(self, spec: SimSpec) -> CellResult:
        """A run's result: from before, or made now. Raises `OutOfTimeError` if there is no time left to make it."""
        if spec.policy in HOSTLESS:
            spec = spec.with_(link_gigabytes=LINKS[0], host_share=0.0)
        if spec not in self._runs:
            if time.monotonic() >= self._until:
                raise OutOfTimeError
            self._runs[spec] = simulate(spec)
            print(f"{described(spec)}: {self._runs[spec].episodes_per_hour:,.0f}/h", file=sys.stderr, flush=True)
            if self._path is not None:
                with self._path.open("ab") as file:
                    file.write(msgspec.json.encode(Run(spec, self._runs[spec])) + b"\n")
        return self._runs[spec]


def described(spec: SimSpec) -> str:
    """A cell, for people."""
    link, host = f"{spec.link_gigabytes:g} GB/s", f"host {spec.host_share:g}x"
    return f"phi {spec.phi:g}, {link}, {host}, {spec.model}, {spec.policy}, seed {spec.seed}"


def interval(ratios: list[float]) -> float | None:
    """Half the width of the 95 % interval of their mean."""
    if len(ratios) < 2:
        return None
    return STUDENT.get(len(ratios), 1.96) * statistics.stdev(ratios) / math.sqrt(len(ratios))


class Choice(NamedTuple):
    """What is compared in each cell."""

    policies: Sequence[SimPolicy]
    caps: Sequence[float]
    """On live episodes, for the policies that are taken with their best one; each where it is below the cell's own."""
    seeds: int
    orders: Sequence[ServiceOrder]


def measure(spec: SimSpec, choice: Choice, results: Results) -> Cell:
    """One cell, every policy under every seed. Raises `OutOfTimeError` if there is no time for all of it."""

    def runs(**changes: object) -> list[CellResult]:
        return [results.get(spec.with_(seed=seed, **changes)) for seed in range(choice.seeds)]

    made = {str(policy): runs(policy=policy) for policy in choice.policies}
    for policy in (policy for policy in CAPPED if policy in choice.policies):
        capped = [made[policy], *(runs(policy=policy, phi=cap) for cap in sorted(choice.caps) if cap < spec.phi)]
        made[f"{policy}@cap"] = max(capped, key=lambda of: statistics.fmean(run.episodes_per_hour for run in of))
    speeds = {name: [run.episodes_per_hour for run in of] for name, of in made.items()}
    fulls = {name: [run.full_ids_per_second for run in of] for name, of in made.items()}
    orders = {str(order): results.get(spec.with_(policy="priced", order=order)) for order in choice.orders}
    means = {name: statistics.fmean(of) for name, of in speeds.items()}
    full_means = {name: statistics.fmean(of) for name, of in fulls.items()}
    best = max(speeds.keys() - {"priced", "unlimited"}, key=lambda name: means[name])
    best_full = max(full_means[name] for name in speeds.keys() - {"priced", "unlimited"})
    ratios = [ours / theirs for ours, theirs in zip(speeds["priced"], speeds[best], strict=True)]
    return Cell(
        phi=spec.phi, link=spec.link_gigabytes, host=spec.host_share, model=spec.model, seeds=choice.seeds,
        policies={name: of[0] for name, of in made.items()}, orders=orders,
        episodes_per_hour=means, best_baseline=best, priced_over_best_baseline=statistics.fmean(ratios),
        interval=interval(ratios), full_ids_per_second=full_means,
        full_over_best_baseline=full_means["priced"] / best_full if best_full else 1.0,
    )  # fmt: skip


def report(cell: Cell) -> None:
    """One line for people."""
    said = ", ".join(f"{name} {speed:,.0f}" for name, speed in cell.episodes_per_hour.items())
    spread = "" if cell.interval is None else f" +- {cell.interval:.3f}"
    full = f"while full x{cell.full_over_best_baseline:.3f}"
    ratio = f"x{cell.priced_over_best_baseline:.3f}{spread} of {cell.best_baseline}, {full}"
    print(f"phi {cell.phi:g} link {cell.link:g} GB/s host {cell.host:g}x {cell.model}: {said}; {ratio}", flush=True)
    for order, one in cell.orders.items():
        speed = f"{one.episodes_per_hour:,.0f} episodes/h"
        print(
            f"    {order}: a group is ready after {one.group_p50:.0f} s, p95 {one.group_p95:.0f} s; {speed}", flush=True
        )


def plotted(cells: list[Cell], model: str) -> str:
    """Episodes an hour against oversubscription, a panel for each link and host."""
    panels: dict[str, list[Series]] = {}
    for link, host in itertools.product(LINKS, HOSTS):
        those = [cell for cell in cells if (cell.link, cell.host, cell.model) == (link, host, model)]
        if those:
            names = list(those[0].episodes_per_hour)
            panels[f"{link:g} GB/s, host {host:g} x the pool"] = [
                Series(name, [(cell.phi, cell.episodes_per_hour[name]) for cell in those]) for name in names
            ]
    return svg(panels, across="oversubscription", up="episodes an hour")


def wanted(given: argparse.Namespace, phis: Sequence[float]) -> Iterator[SimSpec]:
    """The cells to measure."""
    spec = SimSpec(episodes=given.episodes, pool_tokens=given.pool, page_size=128)
    corners = [tuple(map(float, corner.split(":"))) for corner in given.corners.split(",")]
    for model, (link, host), phi in itertools.product(given.models.split(","), corners, phis):
        yield spec.with_(model=model, link_gigabytes=link, host_share=host, phi=phi)


def main() -> None:
    """Measure, print, and optionally end with JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--phi", default="0.8,1.5,2,4")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--corners", default=CORNERS)
    parser.add_argument("--caps", default=CAPS)
    parser.add_argument("--orders", action="store_true")
    parser.add_argument("--pool", type=int)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    if given.quick:
        given.episodes, given.pool, given.models, given.corners = QUICK_EPISODES, QUICK_POOL, MODELS[0], QUICK_CORNERS
        given.phi, given.caps, given.seeds, given.policies = QUICK_PHI, QUICK_CAPS, 1, ",".join(QUICK_POLICIES)
    if "priced" not in (policies := given.policies.split(",")) or not set(policies) - {"priced", "unlimited"}:
        parser.error("--policies: priced, and at least one other beside unlimited, to hold it against")
    phis, caps = ([float(one) for one in numbers.split(",")] for numbers in (given.phi, given.caps))
    choice = Choice(policies, caps, given.seeds, ())
    results = Results(given.results, given.seconds)
    cells = []
    for spec in wanted(given, phis):
        orders: tuple[ServiceOrder, ...] = get_args(ServiceOrder) if given.orders and spec.phi == max(phis) else ()
        try:
            cells.append(measure(spec, choice._replace(orders=orders), results))
        except OutOfTimeError:  # what is in the file already is said all the same
            continue
        report(cells[-1])
    if given.svg is not None and cells:
        given.svg.write_text(plotted(cells, cells[0].model))
    if given.json:
        print(msgspec.json.encode({"cells": cells}).decode())


if __name__ == "__main__":
    main()
