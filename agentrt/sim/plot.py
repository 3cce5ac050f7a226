"""Lines in panels, as an SVG that needs nothing else."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, TOP = 320, 220, 56, 28
"""Of a panel with its margins, in pixels; where its lines begin."""
KEY_HEIGHT = 18
COLOURS = ("#c03028", "#2860b0", "#60a0d8", "#30884c", "#b08020", "#7848a0", "#888888", "#103070", "#509090")


class Series(NamedTuple):
    """One line."""

    name: str
    points: Sequence[tuple[float, float]]


def svg(panels: Mapping[str, Sequence[Series]], *, across: str, up: str) -> str:
    """Panels side by side on one scale from 0, each under its title, and the names of the lines below."""
    points = [point for lines in panels.values() for line in lines for point in line.points]
    most = max((x for x, _ in points), default=1.0), 1.05 * max((y for _, y in points), default=1.0)
    names = list(dict.fromkeys(line.name for lines in panels.values() for line in lines))
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    body = [_panel(at * WIDTH, title, lines, most, colours, across) for at, (title, lines) in enumerate(panels.items())]
    for at, name in enumerate(names):
        place = f'x="{LEFT + 150 * (at % 5)}" y="{HEIGHT + 16 + KEY_HEIGHT * (at // 5)}"'
        body.append(f'<text {place} fill="{colours[name]}">{escape(name)}</text>')
    width, height = max(WIDTH * len(panels), LEFT + 750), HEIGHT + 16 + KEY_HEIGHT * (1 + len(names) // 5)
    turned = f'transform="rotate(-90 14 {HEIGHT / 2})" text-anchor="middle"'
    body.append(f'<text x="14" y="{HEIGHT / 2}" {turned}>{escape(up)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n'
    )


def _panel(
    left: float, title: str, lines: Sequence[Series], most: tuple[float, float], colours: Mapping[str, str], across: str
) -> str:
    right, bottom = WIDTH - 12, HEIGHT - 36

    def place(x: float, y: float) -> str:
        return f"{LEFT + x / most[0] * (right - LEFT):.1f},{bottom - y / most[1] * (bottom - TOP):.1f}"

    drawn = [f'<polyline points="{place(0, most[1])} {place(0, 0)} {place(most[0], 0)}" fill="none" stroke="#444"/>']
    drawn.append(f'<text x="{LEFT}" y="{TOP - 10}">{escape(title)}</text>')
    drawn.append(f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{escape(across)}</text>')
    drawn.append(f'<text x="{LEFT - 4}" y="{TOP + 8}" text-anchor="end">{most[1]:,.0f}</text>')
    for x in sorted({x for line in lines for x, _ in line.points}):
        at = place(x, 0).split(",")[0]
        drawn.append(f'<text x="{at}" y="{bottom + 14}" text-anchor="middle" font-size="10">{x:g}</text>')
    for line in lines:
        points = " ".join(place(x, y) for x, y in line.points)
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colours[line.name]}" stroke-width="1.8"/>')
    return f'<g transform="translate({left} 0)">{"".join(drawn)}</g>'
