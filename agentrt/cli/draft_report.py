"""`agentrt draft report`: what speculation did in a run, by policy version and turn, and the same without it by replay."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer
from rich.console import Group
from rich.table import Table

from agentrt.cli.console import results, say
from agentrt.core.errors import UsageError
from agentrt.core.models import find_model
from agentrt.core.records import BranchRecord, EpisodeRecord, TurnRecord, joined
from agentrt.core.spec import EngineSpec, RunSpec
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.choose import renderer_for
from agentrt.rollout.setup import law_of_turns
from agentrt.rollout.sink import RunFolder, stored_run

if TYPE_CHECKING:
    from agentrt.engine.speculate.replay import Figures, Turn


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Over some turns, in the order in which speculation is reported."""

    name: str
    turns: int
    proposed_length: float
    accepted_length: float
    """Drafted ids that stood per verification; the id that follows them is not counted."""
    generation_seconds: float
    """From a turn's first id to its last, summed over turns, which overlap."""
    total_seconds: float
    off_generation_seconds: float | None = None
    """Without speculation, by replay."""
    off_total_seconds: float | None = None


class _Turn(NamedTuple):
    """One recorded turn: which it is in its branch, the version that began it, and its figures."""

    number: int
    version: int
    on: "Figures"
    off: "Figures | None"


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    replayed: Annotated[
        bool, typer.Option("--replay", help="Sample every turn again, with speculation and without, and compare.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="The weights to replay with: a name or a folder.  \\[default: the run's own]")
    ] = None,
    version: Annotated[int, typer.Option(help="The policy version that these are; only its turns are replayed.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="End standard output with the rows as one JSON array.")
    ] = False,
) -> None:
    """Say what speculation did: proposed length, accepted length, generation time, total time.

    Over the run, by policy version, and by turn. With --replay both times are measured again, and beside them those of the
    same text with speculation off: tools cost nothing there.

    Examples:

    [cyan]agentrt draft report outputs/demo[/cyan]

    [cyan]agentrt draft report outputs/demo --replay[/cyan]
    """
    run, records = stored_run(folder), RunFolder.resume(folder)
    branches = [(record, branch) for record in records.trajectories() for branch in record.branches if branch.turns]
    if not branches:
        raise UsageError(f"{folder} has no turn yet; go on with `agentrt run --resume {folder}`")
    if replayed:
        turns = _replayed(branches, run.spec, model or run.spec.model, version)
    else:
        turns = [turn for _, branch in branches for turn in _recorded(branch)]
    rows = list(_rows(turns))
    results().print(_rendered(rows))
    if as_json:
        print(msgspec.json.encode(rows).decode(), flush=True)


def _recorded(branch: BranchRecord) -> Iterable[_Turn]:
    from agentrt.engine.speculate.replay import Figures

    for number, turn in enumerate(branch.turns, start=1):
        if turn.end == turn.start:  # it was ended before its first id
            continue
        total = turn.queue_seconds + turn.prefill_seconds + turn.decode_seconds
        figures = Figures(
            turn.decode_seconds, total, turn.drafted_tokens, turn.accepted_tokens, turn.verifications, True
        )
        yield _Turn(number, _version(branch, turn), figures, None)


def _version(branch: BranchRecord, turn: TurnRecord) -> int:
    return branch.versions[turn.start - (branch.fork.at if branch.fork else 0)]


def _replayed(
    branches: list[tuple[EpisodeRecord, BranchRecord]], spec: RunSpec, model: str, version: int
) -> list[_Turn]:
    """Every turn of one policy version again, in an engine that speculates and in one that does not."""
    chosen = [
        conversation for record, branch in branches if (conversation := _conversation(record, branch, spec, version))
    ]
    if not chosen:
        raise UsageError(
            f"no branch was sampled by version {version} from its first turn on; give --model and --version"
        )
    path = find_model(model)
    tokenizer = Tokenizer.load(path)
    law = law_of_turns(spec, renderer_for(path, tokenizer))
    from agentrt.engine.local import local_engine  # here, because it imports torch
    from agentrt.engine.speculate.replay import replay

    figures = {}
    for speculate in ("off", "auto"):
        say(f"replaying {sum(map(len, chosen))} turns with engine.speculate={speculate}")
        engine: EngineSpec = msgspec.structs.replace(spec.engine, speculate=speculate, urls=())
        core = local_engine(path, tokenizer, engine).core
        figures[speculate] = replay(core, chosen, law, spec.max_concurrent)
        core.stop()
    pairs = [list(zip(*both, strict=False)) for both in zip(figures["auto"], figures["off"], strict=True)]
    different = sum(not (on.is_same and off.is_same) for conversation in pairs for on, off in conversation)
    if different:
        say(
            f"{different} turns said something else than was recorded (another model or engine?); what followed is left out"
        )
    return [
        _Turn(number, version, on, off)
        for conversation in pairs
        for number, (on, off) in enumerate(conversation, start=1)
    ]


def _conversation(record: EpisodeRecord, branch: BranchRecord, spec: RunSpec, version: int) -> "list[Turn]":
    """The turns of a branch up to the first that another version had a part in, or that was cut short from outside."""
    from agentrt.engine.speculate.replay import Turn

    ids, start, found = joined(record, branch).token_ids, 0, []
    shared = branch.fork.at if branch.fork else 0
    for turn in branch.turns:
        versions = set(branch.versions[turn.start - shared : turn.end - shared])
        if versions != {version} or turn.finish_reason not in ("stop", "length"):
            break
        longest = turn.end - turn.start if turn.finish_reason == "length" else spec.limits.max_turn_tokens
        found.append(Turn(ids[start : turn.start], ids[turn.start : turn.end], turn.seed, longest))
        start = turn.end
    return found


def _rows(turns: list[_Turn]) -> Iterable[Row]:
    yield _row("run", turns)
    kinds: tuple[tuple[str, Callable[[_Turn], int]], ...] = (
        ("version", lambda turn: turn.version), ("turn", lambda turn: turn.number)
    )  # fmt: skip
    for name, key in kinds:
        for value in sorted({key(turn) for turn in turns}):
            yield _row(f"{name} {value}", [turn for turn in turns if key(turn) == value])


def _row(name: str, turns: list[_Turn]) -> Row:
    on, off = [turn.on for turn in turns], [turn.off for turn in turns if turn.off is not None]
    verifications = max(sum(one.verifications for one in on), 1)
    return Row(
        name=name, turns=len(turns), proposed_length=sum(one.drafted for one in on) / verifications,
        accepted_length=sum(one.accepted for one in on) / verifications,
        generation_seconds=sum(one.generation_seconds for one in on), total_seconds=sum(one.total_seconds for one in on),
        off_generation_seconds=sum(one.generation_seconds for one in off) if off else None,
        off_total_seconds=sum(one.total_seconds for one in off) if off else None,
    )  # fmt: skip


def _rendered(rows: list[Row]) -> Group:
    table = Table(box=None, padding=(0, 2, 0, 0))
    has_off = rows[0].off_total_seconds is not None
    table.add_column("")
    for name in ("turns", "proposed length", "accepted length", "generation", "total"):
        table.add_column(name, justify="right")
    for name in ("off: generation", "total") if has_off else ():
        table.add_column(name, justify="right")
    for row in rows:
        seconds = [row.generation_seconds, row.total_seconds]
        if row.off_generation_seconds is not None and row.off_total_seconds is not None:
            seconds += [row.off_generation_seconds, row.off_total_seconds]
        lengths = f"{row.proposed_length:.2f}", f"{row.accepted_length:.2f}"
        table.add_row(row.name, str(row.turns), *lengths, *(f"{value:.2f} s" for value in seconds))
    return Group(table)
