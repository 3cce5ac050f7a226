"""Draw docs/kv-timeline.svg: two conversations on a device that holds one and a half, played on the toy engine.

python docs/kv_timeline.py
"""

from pathlib import Path

from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.engine.sequence import Sequence
from agentrt.engine.step import EngineCore
from agentrt.testing.copier import FaultyCopier
from agentrt.testing.toy import ToyRunner, hashed_logits

COLORS = {
    "open": "#e5e7eb", "running": "#2563eb", "cached": "#93c5fd", "parking": "#fbbf24", "parked": "#d1d5db",
    "restoring": "#f97316", "dropped": "#ef4444", "pinned": "#7c3aed",
}  # fmt: skip
CELL, ROW, LEFT = 14, 34, 60


class Conversation:
    """One row: its state after each step."""

    def __init__(self, core: EngineCore, name: str) -> None:
        self.core, self.name, self.tokens, self.lease = core, name, Tokens(), core.open()
        self.states: list[str] = []

    def ask(self, ids: list[int], max_tokens: int) -> Sequence:
        self.tokens.observe(ids)
        sequence = Sequence(tokens=self.tokens, params=SamplingParams(), max_tokens=max_tokens)
        self.core.submit(sequence, self.lease)
        return sequence


def play() -> list[Conversation]:
    """A turn of A, a turn of B while A's tool runs, A's next turn while B runs."""
    copier = FaultyCopier(delay=1)
    runner = ToyRunner(hashed_logits(8), num_pages=15, page_size=2, host_pages=32, copier=copier)
    core = EngineCore(
        runner, EngineSpec(page_size=2, kv_tokens=30, step_tokens=64), vocab_size=8, bytes_of=lambda _: b""
    )
    a, b = Conversation(core, "A"), Conversation(core, "B")

    def step(sequence: Sequence | None = None, most: int = 99) -> None:
        while most and (sequence is None or not sequence.is_finished):
            core.step()
            for one in (a, b):
                one.states.append(str(one.lease.state))
            most -= 1

    step(a.ask([1, 2, 3, 4, 5, 6, 7, 0, 1, 2], 6))
    core.pause(a.lease, "search")
    step(most=3)
    turn = b.ask([3, 1, 4, 1, 5, 2, 6, 5, 3, 5], 12)
    step(turn, 6)
    back = a.ask([2, 2], 4)
    step(turn)
    core.pause(b.lease, "search")
    step(back)
    core.pause(a.lease, "search")
    step(most=3)
    return [a, b]


def draw(rows: list[Conversation]) -> str:
    """The picture."""
    steps = len(rows[0].states)
    width, height = LEFT + steps * CELL + 20, 30 + len(rows) * ROW + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    ]
    for index, row in enumerate(rows):
        y = 20 + index * ROW
        parts.append(f'<text x="10" y="{y + 16}">{row.name}</text>')
        for at, state in enumerate(row.states):
            x = LEFT + at * CELL
            parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="22" fill="{COLORS[state]}"><title>{state}</title></rect>'
            )
    x, y = LEFT, 30 + len(rows) * ROW
    for state in dict.fromkeys(state for row in rows for state in row.states):
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLORS[state]}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 11}">{state}</text>')
        x += 80
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("kv-timeline.svg").write_text(draw(play()), encoding="utf-8")
