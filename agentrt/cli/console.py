"""Where a command writes: results to standard output, words for the person at the terminal to standard error."""

import sys

from rich.console import Console

WIDTH = 120
"""Of what goes to a file or a pipe, where there is no terminal to ask."""


def results() -> Console:
    """For what a command was asked for."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def say(line: str) -> None:
    """A line for the person at the terminal, apart from the command's results."""
    print(line, file=sys.stderr, flush=True)
