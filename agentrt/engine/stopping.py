"""Stop strings, found in the bytes of sampled tokens as they come, also when one spans tokens or ends inside one."""


class StopStrings:
    """Feeds on the bytes of one turn. Keeps no more of them than the longest stop string could need."""

    __slots__ = ("_stops", "_tail")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = {stop: stop.encode() for stop in stops}
        self._tail = b""

    def feed(self, text: bytes) -> str | None:
        """The stop string that these bytes complete, the one that begins first; None if there is none."""
        if not self._stops:
            return None
        window = self._tail + text
        found = [(at, stop) for stop, needle in self._stops.items() if (at := window.find(needle)) >= 0]
        self._tail = window[-(max(map(len, self._stops.values())) - 1) or len(window) :]
        return min(found)[1] if found else None
