"""What a run came to: counts and means over its records, for a person and as JSON."""

import math
from collections import Counter
from collections.abc import Collection, Iterable

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from agentrt.core.records import EpisodeRecord, good_records
from agentrt.report.drafts import Speculation, speculation
from agentrt.report.failures import cause_lines, one_line

UNKNOWN = "other names"
"""For calls of tools that do not exist."""
CALL_COUNTS = "tool_calls_"
"""Metrics that count calls by outcome; `Summary.tools` has them by tool."""
RAISED = "reward_raised"
"""How the reason begins for a grader that raised, and the name of the event that has its traceback."""
GROUPS_SHOWN = 5
PHASES = ("queue", "prefill", "decode", "tools", "scoring")


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One named reward over the good records that have it."""

    mean: float | None
    weight: float
    count: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Over the good record of each episode, failures aside."""

    episodes: int
    """That the run asked for."""
    good: int
    failed: int
    """Episodes whose attempts all failed."""
    not_run: int
    """Episodes without a record: the run was interrupted, or its split has fewer tasks."""
    reward_mean: float | None
    reward_std: float | None
    """Population standard deviation."""
    scored: int
    rewards: dict[str, Component]
    metrics: dict[str, float]
    stop_reasons: dict[str, int]
    failures: dict[str, int]
    """Attempts that failed, by what was raised."""
    unscored: dict[str, int]
    """Good episodes without a reward, by reason."""
    turns: int
    tool_calls: int
    tools: dict[str, dict[str, int]]
    """How the calls of each tool ended. A policy invents many names, even whole sentences: they are counted together."""
    tokens_sampled: int
    tokens_prefilled: int
    tokens_reused: int
    speculation: dict[str, Speculation]
    """By policy version, and over all; empty if nothing was drafted."""
    kv: dict[str, float]
    """What KV came to over all episodes, by the names that a record's `kv` has."""
    kv_tools: dict[str, dict[str, float]]
    """The same while each tool ran, and in the turns right after it."""
    kv_groups: dict[str, dict[str, float]]
    """The same of the groups that held most, by task."""
    seconds: dict[str, float]
    """Summed over episodes, which overlap: where an episode's time goes."""
    slowest: str
    """The episode that took longest, and on what."""


def summarise(records: Iterable[EpisodeRecord], episodes: int, tools: Collection[str]) -> Summary:
    """The summary of all attempts on disk, of a run that asked for `episodes` and has `tools`."""
    attempts = list(records)
    seen = len({record.key for record in attempts})
    good = list(good_records(attempts).values())
    rewards = [record.reward for record in good if record.reward is not None]
    turns = [turn for record in good for branch in record.branches for turn in branch.turns]
    by_tool = _kv_by_tool(good)
    return Summary(
        episodes=episodes,
        good=len(good),
        failed=seen - len(good),
        not_run=max(0, episodes - seen),
        reward_mean=_mean(rewards),
        reward_std=_deviation(rewards),
        scored=len(rewards),
        rewards=_components(good),
        metrics=_metrics(good),
        stop_reasons=dict(Counter(record.stop_reason.value for record in good).most_common()),
        failures=dict(Counter(_cause(record) for record in attempts if record.status == "error").most_common()),
        unscored=dict(Counter(record.reward_reason or "unknown" for record in good if record.reward is None)),
        turns=len(turns),
        tool_calls=sum(len(record.calls) for record in good),
        tools=_tools(good, tools),
        tokens_sampled=sum(turn.end - turn.start for turn in turns),
        tokens_prefilled=sum(turn.start - turn.cached_tokens for turn in turns),
        tokens_reused=sum(turn.cached_tokens for turn in turns),
        speculation=speculation(good),
        kv=by_tool.pop("", {}),
        kv_tools=by_tool,
        kv_groups=_kv_groups(good),
        seconds={phase: sum(record.timing.get(phase, 0.0) for record in good) for phase in PHASES},
        slowest=_slowest(good),
    )


def render(
    summary: Summary, wall_seconds: float, sampled: int, folder: str, *, with_rewards: bool = True
) -> RenderableType:
    """The summary as a person reads it, one screen. What was just run took `wall_seconds`, for `sampled` tokens."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    not_run = f", {summary.not_run} not run" if summary.not_run else ""
    table.add_row("episodes", f"{summary.good} good, {summary.failed} failed{not_run} of {summary.episodes}")
    for line in cause_lines(summary.failures):
        table.add_row("", f"[red]{escape(line)}[/red]")
    if summary.failures:
        table.add_row("", "where: `error.traceback` of the records")
    if with_rewards:
        table.add_row("reward", _spread(summary))
        for name, part in summary.rewards.items():
            mean = "none" if part.mean is None else f"{part.mean:.3f}"
            table.add_row(f"  {name}", f"{mean}  (weight {part.weight:g}, {part.count} scored)")
    for line in cause_lines(summary.unscored):
        table.add_row("", f"[red]not scored: {escape(line)}[/red]")
    if any(reason.startswith(RAISED) for reason in summary.unscored):
        table.add_row("", f"where: `{RAISED}` in logs/agentrt.jsonl")
    for name, value in summary.metrics.items():
        table.add_row(f"  {escape(name)}", f"{value:.3f}  (metric)")
    table.add_row("ended by", ", ".join(f"{reason} {count}" for reason, count in summary.stop_reasons.items()) or "–")
    table.add_row("turns", f"{summary.turns}, with {summary.tool_calls} tool calls")
    for name, outcomes in summary.tools.items():
        table.add_row(f"  {escape(name)}", ", ".join(f"{outcome} {count}" for outcome, count in outcomes.items()))
    table.add_row("tokens", _tokens(summary, sampled / wall_seconds if wall_seconds else 0.0))
    for name, figures in summary.speculation.items():
        table.add_row("drafts" if name == "all" else f"  {name}", _drafts(figures))
    if _byte_seconds(summary.kv):
        table.add_row("KV", _kv(summary.kv))
        for name, kv in summary.kv_tools.items():
            table.add_row(f"  {escape(name)}", _kv(kv))
    table.add_row("time", f"{wall_seconds:.1f} s; an episode's: {_split(summary.seconds)}")
    if summary.slowest:
        table.add_row("slowest", escape(summary.slowest))
    table.add_row("records", escape(folder))
    return Group("", table)


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _deviation(values: list[float]) -> float | None:
    mean = _mean(values)
    return None if mean is None else math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _components(good: list[EpisodeRecord]) -> dict[str, Component]:
    weights = {name: score.weight for record in good for name, score in record.rewards.items()}
    scores: dict[str, list[float]] = {name: [] for name in weights}
    for record in good:
        for name, part in record.rewards.items():
            if part.score is not None:
                scores[name].append(part.score)
    return {
        name: Component(mean=_mean(scores[name]), weight=weight, count=len(scores[name]))
        for name, weight in weights.items()
    }


def _metrics(good: list[EpisodeRecord]) -> dict[str, float]:
    names = dict.fromkeys(name for record in good for name in record.metrics if not name.startswith(CALL_COUNTS))
    values = {name: [record.metrics[name] for record in good if name in record.metrics] for name in names}
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in values.items()}


def _tools(good: list[EpisodeRecord], tools: Collection[str]) -> dict[str, dict[str, int]]:
    outcomes: dict[str, Counter[str]] = {}
    for record in good:
        for call in record.calls:
            name = call.name if call.name in tools else UNKNOWN
            outcomes.setdefault(name, Counter())[call.outcome] += 1
    return {name: dict(counts.most_common()) for name, counts in sorted(outcomes.items())}


def _kv_by_tool(good: list[EpisodeRecord]) -> dict[str, dict[str, float]]:
    """Sums over the records' `kv`, by tool; those of no tool under ""."""
    sums: dict[str, dict[str, float]] = {}
    for record in good:
        for key, value in record.kv.items():
            tool, _, name = key.rpartition("/")
            of_tool = sums.setdefault(tool, {})
            of_tool[name] = of_tool.get(name, 0.0) + value
    return sums


def _kv_groups(good: list[EpisodeRecord]) -> dict[str, dict[str, float]]:
    """By task, the groups that held most on device and host together."""
    members: dict[str, list[EpisodeRecord]] = {}
    for record in good:
        members.setdefault(record.task_id, []).append(record)
    sums = {task_id: _kv_by_tool(records).get("", {}) for task_id, records in members.items()}
    return dict(sorted(sums.items(), key=lambda one: -_byte_seconds(one[1]))[:GROUPS_SHOWN])


def _byte_seconds(kv: dict[str, float]) -> float:
    return kv.get("device_byte_seconds", 0.0) + kv.get("host_byte_seconds", 0.0)


def _kv(kv: dict[str, float]) -> str:
    device, host = kv.get("device_byte_seconds", 0.0) / 1e9, kv.get("host_byte_seconds", 0.0) / 1e9
    again, wait = kv.get("tokens_reprefilled", 0.0), kv.get("wait_seconds", 0.0)
    return f"{device:.3g} GB·s on the device, {host:.3g} on the host; {again:.0f} tokens computed again, {wait:.2f} s waited"


def _slowest(good: list[EpisodeRecord]) -> str:
    longest = max(good, key=lambda record: record.timing.get("total", 0.0), default=None)
    if longest is None:
        return ""
    spent = {phase: longest.timing.get(phase, 0.0) for phase in PHASES}
    total = longest.timing.get("total", 0.0)
    return f"{one_line(longest.task_id)} member {longest.member}: {total:.2f} s, {_split(spent)}"


def _cause(record: EpisodeRecord) -> str:
    return f"{record.error.type}: {record.error.message}" if record.error else "unknown"


def _spread(summary: Summary) -> str:
    if summary.reward_mean is None:
        return "none: no episode was scored"
    return f"{summary.reward_mean:.3f} ± {summary.reward_std:.3f} over {summary.scored} scored"


def _tokens(summary: Summary, rate: float) -> str:
    return (
        f"{summary.tokens_sampled} sampled ({rate:.0f}/s), {summary.tokens_prefilled} prefilled, "
        f"{summary.tokens_reused} reused"
    )


def _drafts(part: Speculation) -> str:
    return (
        f"{part.proposed_length:.2f} ids proposed, {part.accepted_length:.2f} accepted at a time; "
        f"generation {part.generation_seconds:.1f} s, turns {part.total_seconds:.1f} s"
    )


def _split(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    return ", ".join(f"{phase} {value / total:.0%}" for phase, value in seconds.items()) if total else "–"
