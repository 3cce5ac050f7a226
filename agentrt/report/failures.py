"""What went wrong, for people: a line each, of which the most frequent are shown. The records hold all of it."""

from collections.abc import Iterator, Mapping

from agentrt.core.records import EpisodeRecord

LINE_CHARACTERS = 300
CAUSES_SHOWN = 5


def failure_line(record: EpisodeRecord) -> str:
    """A failed attempt: which it is, whose failure it was, what was raised."""
    assert record.error is not None, "it has not failed"
    where = f"{record.task_id} member {record.member}"
    return one_line(f"failed: {where}: {record.error.boundary}: {record.error.type}: {record.error.message}")


def cause_lines(counts: Mapping[str, int]) -> Iterator[str]:
    """The causes that are most frequent, and how many there are besides."""
    ordered = sorted(counts.items(), key=lambda one: -one[1])
    for cause, count in ordered[:CAUSES_SHOWN]:
        yield f"{count} × {one_line(cause)}"
    if rest := [count for _, count in ordered[CAUSES_SHOWN:]]:
        yield f"{sum(rest)} × something else, {len(rest)} causes"


def one_line(text: str) -> str:
    """The text in one line that is not too long, without characters that move a terminal."""
    line = " ".join(text[: 2 * LINE_CHARACTERS].split())
    line = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)
    return line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]}…"
