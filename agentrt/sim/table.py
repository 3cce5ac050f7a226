"""Cells side by side, for people."""

from collections.abc import Sequence

from rich.table import Table

from agentrt.sim.spec import CellResult


def render(cells: Sequence[CellResult]) -> Table:
    """A row for each cell; where episodes failed it says how many, for its other numbers are of fewer then."""
    table = Table("φ", "policy", "episodes/h", "turn p50", "p95", "group p50", "p95", "computed again", "device TB·s")
    for cell in cells:
        table.add_row(
            f"{cell.phi:.3g}", f"{cell.policy}, {cell.failed} failed" if cell.failed else cell.policy,
            f"{cell.episodes_per_hour:,.0f}", f"{cell.turn_p50:.2f} s",
            f"{cell.turn_p95:.2f} s", f"{cell.group_p50:.0f} s", f"{cell.group_p95:.0f} s",
            f"{cell.tokens_reprefilled:,}", f"{cell.kv.get('device_byte_seconds', 0.0) / 1e12:,.1f}",
        )  # fmt: skip
    return table
