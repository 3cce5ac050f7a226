"""Contenders side by side: rounds interleaved in one run, ratios with intervals, a plot."""

import json
import os
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

Rates = dict[str, float]
"""By case; what is larger is better."""
Found = dict[str, dict[str, list[float]]]
"""By contender and case, a rate for each round."""
BAR, GAP, LABEL, WIDTH = 14, 10, 190, 420
COLOURS = ("#2f6fab", "#7fa8cc", "#d98c3f", "#8a8f57", "#9c6b9e", "#777777")


def interleave(contenders: Mapping[str, Callable[[], Rates]], rounds: int, kept: Path | None = None) -> Found:
    """A B A B ...: every contender once a round. Each warms itself up.

    Whole rounds are kept in the file `kept`, and those that it has already count as some of these.
    """
    done: list[dict[str, Rates]] = json.loads(kept.read_text()) if kept and kept.is_file() else []
    for number in range(len(done), rounds):
        done.append({})
        for name, run in contenders.items():
            done[-1][name] = run()
            for case, rate in done[-1][name].items():
                print(f"  round {number + 1:<3} {name:<20} {case:<18} {rate:8.1f}", flush=True)
        if kept:
            kept.write_text(json.dumps(done))
    found: Found = {}
    for rates in done:
        for name, of_case in rates.items():
            for case, rate in of_case.items():
                found.setdefault(name, {}).setdefault(case, []).append(rate)
    return found


def peer_environment() -> dict[str, str]:
    """This process's environment, less what would bind a peer to our choices.

    Our engine lets idle OpenMP threads sleep (OMP_WAIT_POLICY); llama.cpp's decode loses a third of its rate by that.
    """
    ours = ("OMP_", "GOMP_", "KMP_", "MKL_", "NUMBA_", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


@contextmanager
def awake(process: subprocess.Popen[Any]) -> Iterator[None]:
    """A peer, the first of its session, runs inside only: idle workers spin on the cores that others are measured on."""
    os.killpg(process.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGSTOP)


def ratio(ours: list[float], theirs: list[float]) -> str:
    """The median of the rounds' ratios, and the least and largest: with 5 rounds these hold the true median with 94 %."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def table(found: Found, ours: str, unit: str, peers: list[str]) -> str:
    """A Markdown table: medians by contender, and ours over the best peer of each case."""
    names = list(found)
    lines = [f"| {unit} | {' | '.join(names)} | ours / best peer |", "|---" * (len(names) + 2) + "|"]
    for case in found[ours]:
        medians = {name: statistics.median(found[name][case]) for name in names if found[name].get(case)}
        rivals = [name for name in peers if name in medians]
        best = max(rivals, key=medians.__getitem__, default=None)
        against = f"{ratio(found[ours][case], found[best][case])}, {best}" if best else "no peer here"
        cells = [f"{medians[name]:.1f}" if name in medians else "" for name in names]
        lines.append(f"| {case} | {' | '.join(cells)} | {against} |")
    return "\n".join(lines)


def plot(found: Found, title: str, path: Path) -> None:
    """Medians as bars, a group for each case, each case to its own scale: an SVG file."""
    cases = list(dict.fromkeys(case for rates in found.values() for case in rates))
    parts, y = [f'<text x="0" y="14" font-weight="bold">{escape(title)}</text>'], 30
    for case in cases:
        medians = {name: statistics.median(rates[case]) for name, rates in found.items() if rates.get(case)}
        parts.append(f'<text x="0" y="{y + 11}">{escape(case)}</text>')
        for name, value in medians.items():
            width = WIDTH * value / max(medians.values())
            colour = COLOURS[list(found).index(name) % len(COLOURS)]
            parts.append(f'<rect x="{LABEL - 60}" y="{y}" width="{width:.0f}" height="{BAR - 2}" fill="{colour}"/>')
            parts.append(f'<text x="{LABEL - 56 + width:.0f}" y="{y + 10}">{value:.0f} {escape(name)}</text>')
            y += BAR
        y += GAP
    size = f'width="{LABEL + WIDTH + 160}" height="{y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    path.write_text("\n".join([head, *parts, "</svg>"]) + "\n", encoding="utf-8")
