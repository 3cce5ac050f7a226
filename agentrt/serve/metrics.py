"""What the server counts, and the text that Prometheus reads."""

from collections import Counter

import msgspec

from agentrt.core.protocol import EngineStatistics

GAUGES = (
    "running", "waiting", "sessions", "version", "pages_total", "pages_free", "pages_cached", "pages_pinned", "sessions_parked",
    "host_pages_total", "host_pages_free",
)  # fmt: skip
"""Fields of the engine's statistics that go up and down; the others are totals."""


class Metrics:
    """Counts since the server started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By endpoint and HTTP status; 499 is a client that went away."""
        self.num_active = 0
        """Requests under way."""

    def text(self, engine: EngineStatistics, recordings: int) -> str:
        """Everything, in Prometheus' text format."""
        lines = ["# TYPE agentrt_requests_total counter"]
        for (endpoint, status), count in sorted(self.requests.items()):
            lines.append(f'agentrt_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}')
        lines += _one("requests_active", "gauge", self.num_active) + _one("recordings", "gauge", recordings)
        for name, value in msgspec.structs.asdict(engine).items():
            if isinstance(value, (int, float)):
                is_gauge = name in GAUGES
                lines += _one(
                    f"engine_{name}" + ("" if is_gauge else "_total"), "gauge" if is_gauge else "counter", value
                )
        return "\n".join(lines) + "\n"


def _one(name: str, kind: str, value: float) -> list[str]:
    return [f"# TYPE agentrt_{name} {kind}", f"agentrt_{name} {value}"]
