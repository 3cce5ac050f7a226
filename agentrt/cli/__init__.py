"""The command line. Errors are one sentence on standard error: exit code 2 for the user's, 1 for what failed."""

import sys
import traceback

import typer

from agentrt.cli.describe import describe
from agentrt.cli.doctor import doctor
from agentrt.cli.draft import app as draft
from agentrt.cli.eval import evaluate
from agentrt.cli.export import export
from agentrt.cli.init import init
from agentrt.cli.launch import INTERRUPTED
from agentrt.cli.mismatch import mismatch
from agentrt.cli.pull import pull
from agentrt.cli.replay import replay
from agentrt.cli.run import run
from agentrt.cli.serve import serve
from agentrt.cli.sim import sim
from agentrt.cli.tools import app as tools
from agentrt.core.errors import AgentrtError, EnvironmentFailure, UsageError

app = typer.Typer(
    name="agentrt", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Rolls out agents for reinforcement learning: real episodes, sandboxed tools, exact tokens.",
)  # fmt: skip
app.command()(run)
app.command("eval")(evaluate)
app.command()(serve)
app.command()(describe)
app.command()(init)
app.command()(export)
app.command()(sim)
app.command()(replay)
app.command()(mismatch)
app.command()(pull)
app.command()(doctor)
app.add_typer(tools, name="tools")
app.add_typer(draft, name="draft")


def main() -> None:
    """The console script."""
    try:
        app()
    except UsageError as error:
        _fail(error, 2)
    except EnvironmentFailure as error:  # the user's code raised, so it is theirs to see where
        traceback.print_exception(error.__cause__)
        _fail(error, 1)
    except AgentrtError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _fail(error: AgentrtError, code: int) -> None:
    print(f"agentrt: {error}", file=sys.stderr)
    sys.exit(code)
