"""`agentrt draft`. `train` makes a draft head for a run's model, from the run's own trajectories."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from agentrt.cli.console import results, say
from agentrt.cli.draft_report import report
from agentrt.cli.options import AsJson
from agentrt.core.errors import UsageError
from agentrt.core.models import find_model
from agentrt.core.spec import nearest
from agentrt.rollout.batch import row_of
from agentrt.rollout.sink import RunFolder, require_writable, stored_run

if TYPE_CHECKING:
    from agentrt.engine.speculate.offline import Outcome, Text
    from agentrt.engine.speculate.train import Report

QUIET_SECONDS = 5.0
"""Between two lines on how far it is."""
KINDS = ("eagle3", "mtp")

app = typer.Typer(no_args_is_help=True, help="Speculative decoding: train draft heads, and see what drafts did.")
app.command()(report)


@app.command()
def train(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; their finished trajectories are learnt.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A new folder for the head.  \\[default: RUN/draft, of the first]"),
    ] = None,
    kind: Annotated[str, typer.Option(help="eagle3 or mtp.")] = "eagle3",
    model: Annotated[
        str | None, typer.Option(help="The policy to draft for: a name or a folder.  \\[default: the first run's own]")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="A head to go on from.")] = None,
    steps: Annotated[int, typer.Option(help="Updates.")] = 1000,
    depths: Annotated[int, typer.Option(help="Ids in a row that it learns to draft.")] = 3,
    vocabulary: Annotated[
        int, typer.Option(help="EAGLE-3: it drafts the ids that were sampled most, this many.")
    ] = 8192,
    seed: Annotated[int, typer.Option(help="The same seed gives the same head.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a draft head from the policy's own forward pass over the trajectories of runs.

    A tenth of the trajectories is kept out; the table says how often a drafted id can stand there, before and after.
    Use the head with `--set engine.speculate=auto --set engine.draft=FOLDER`.

    Examples:

    [cyan]agentrt draft train outputs/demo[/cyan]

    [cyan]agentrt draft train outputs/calculator outputs/lookup -o drafts/both[/cyan]

    [cyan]agentrt draft train outputs/demo --steps 3000 -o drafts/demo[/cyan]

    [cyan]agentrt draft train outputs/step40 --model checkpoints/step-40 --start drafts/demo -o drafts/step-40[/cyan]
    """
    for name, value in (("steps", steps), ("depths", depths), ("vocabulary", vocabulary)):
        if value < 1:
            raise UsageError(f"--{name} must be 1 or more, not {value}")
    if kind not in KINDS:
        raise UsageError(f"unknown --kind {kind!r}; {nearest(kind, KINDS)}")
    target = output or folders[0] / "draft"
    if target.exists():
        raise UsageError(f"{target} exists; give another folder with --output")
    require_writable(target)
    runs = [stored_run(folder) for folder in folders]
    from agentrt.engine.speculate.offline import train_head  # here, because it imports torch

    texts = [text for folder in folders for text in _texts(RunFolder.resume(folder))]
    outcome = train_head(
        find_model(model or runs[0].spec.model), texts, target, "eagle3" if kind == "eagle3" else "mtp", steps=steps,
        depths=depths, vocabulary=vocabulary, start=start, seed=seed, progress=_Progress(steps),
    )  # fmt: skip
    results().print(_rendered(outcome, target))
    if as_json:
        print(msgspec.json.encode({"folder": str(target), **outcome._asdict()}).decode(), flush=True)


def _texts(records: RunFolder) -> "list[Text]":
    """Every branch of the finished trajectories; of a fork, what it shares is learnt where it was said."""
    from agentrt.engine.speculate.offline import Text

    finished = (record for record in records.trajectories() if record.status == "ok")
    rows = (row_of(record, branch, None) for record in finished for branch in record.branches)
    return [Text(row.token_ids, row.mask) for row in rows]


class _Progress:
    """Says every few seconds how far training is."""

    def __init__(self, steps: int) -> None:
        self._steps, self._spoke = steps, time.monotonic()

    def __call__(self, step: int, report: "Report") -> None:
        if time.monotonic() - self._spoke >= QUIET_SECONDS:
            self._spoke = time.monotonic()
            shares = " ".join(f"{overlap:.2f}" for overlap in report.overlaps)
            say(f"step {step + 1} of {self._steps}: loss {report.loss:.3f}, a drafted id can stand {shares} (by depth)")


def _rendered(outcome: "Outcome", target: Path) -> Table:
    from agentrt.engine.speculate.offline import LONGEST  # here, because it imports torch

    cut = f"; of {outcome.num_cut} the first {LONGEST} ids were read" if outcome.num_cut else ""
    table = Table(
        box=None, padding=(0, 2, 0, 0), title_justify="left",
        title=f"{escape(str(target))}: {outcome.texts} trajectories{cut}, {outcome.steps} steps, {outcome.seconds:.0f} s; "
        f"on {outcome.held_out} that were kept out, a drafted id can stand",
    )  # fmt: skip
    for name in ("depth", "before", "after"):
        table.add_column(name, justify="right")
    for depth, (before, after) in enumerate(zip(outcome.before, outcome.after, strict=True), start=1):
        table.add_row(str(depth), f"{before:.3f}", f"{after:.3f}")
    return table
