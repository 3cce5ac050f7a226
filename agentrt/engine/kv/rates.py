"""What computing and copying cost on this machine, fitted to the steps that were run. Pure.

A step takes about `fixed + per_row R + per_row_key K + per_decode_key D` seconds: R rows, K pairs of a prompt's row and a
key it attends, D keys that decodes attend. Recursive least squares with forgetting find the four, so they follow a machine
that is shared or gets hot; what is marginal in them is what an action costs everybody, whatever else the steps do.
"""

from collections.abc import Iterable
from typing import NamedTuple

FORGETTING = 0.998
"""What a step that is one step older weighs less: the last 500 count."""
ENOUGH_STEPS = 32
"""Before so many, nothing is taken to be known."""
SCALES = (1.0, 1e-3, 1e-6, 1e-6)
"""Of the four, so that they are of one size in the fit."""
SMOOTHING = 0.05
REPEATS = 8
"""Steps of the same decodes say nearly the same: one in so many is counted."""
UNSURE = 1e6
"""The variance that each is given before anything was seen."""


class Rates(NamedTuple):
    """What an engine has measured so far. Seconds."""

    per_row: float | None = None
    """Of a row of a prompt that attends nothing; None while too little was seen."""
    per_row_key: float = 0.0
    """What such a row takes more for each key it attends."""
    fixed_share: float = 1.0
    """Of a step's time, what it would take with nothing in it: what one more sequence need not pay again."""
    bytes_per_second: float = 0.0
    """Between device and host, one way; 0 if there is no host."""
    token_bytes: float = 0.0
    """Of KV."""
    wait: float = 0.0
    """That turns whose KV was gone waited lately to be let in."""

    def prefill(self, start: int, length: int) -> float | None:
        """To compute `length` rows of a prompt from position `start` on; None if that is not known."""
        if self.per_row is None:
            return None
        return length * (self.per_row + self.per_row_key * (start + length / 2))

    def copying(self, tokens: int) -> float | None:
        """To copy the KV of so many ids one way; None if there is nowhere to copy it."""
        return tokens * self.token_bytes / self.bytes_per_second if self.bytes_per_second else None


class StepCosts:
    """Told of each step; says what the next ones cost."""

    def __init__(self) -> None:
        self._coefficients = 0.0, 0.0, 0.0, 0.0
        none, unsure = 0.0, UNSURE
        self._covariance = [
            (unsure, none, none, none),
            (none, unsure, none, none),
            (none, none, unsure, none),
            (none, none, none, unsure),
        ]
        self._steps = self._repeats = 0
        self._decodes = -1.0
        """Rows of the step before, if it was one of decodes only."""
        self._fixed_share, self._wait = 1.0, 0.0

    def note(self, chunks: Iterable[tuple[int, int]], seconds: float, decodes: int = 0, keys: int = 0) -> None:
        """A step took `seconds` for these, from which position on and how many rows (a single row is a decode), and for
        `decodes` rows that attend `keys`."""
        rows, row_keys, decode_keys = float(decodes), 0.0, float(keys)
        for start, length in chunks:
            rows += length
            if length == 1:
                decode_keys += start
            else:
                row_keys += length * (start + length / 2)
        self.note_work(rows, row_keys, decode_keys, seconds)

    def note_work(self, rows: float, row_keys: float, decode_keys: float, seconds: float) -> None:
        """A step took `seconds` for so many rows, pairs of a prompt's row and a key, and keys of decodes."""
        self._repeats = self._repeats + 1 if rows == self._decodes and not row_keys else 0
        self._decodes = -1.0 if row_keys else rows
        if self._repeats % REPEATS:
            return
        self._fit((1.0, rows, row_keys, decode_keys), seconds)
        self._steps += 1
        if seconds > 0 and self._steps >= ENOUGH_STEPS:
            share = min(max(self._coefficients[0] / seconds, 0.0), 1.0)
            self._fixed_share += SMOOTHING * (share - self._fixed_share)

    def note_wait(self, seconds: float) -> None:
        """A turn whose KV was gone waited so long to be let in."""
        self._wait += SMOOTHING * (seconds - self._wait)

    def rates(self, token_bytes: float, bytes_per_second: float) -> Rates:
        """What is known now, beside what the copier has measured."""
        per_row, per_row_key = (max(self._coefficients[at] * SCALES[at], 0.0) for at in (1, 2))
        if self._steps < ENOUGH_STEPS or not per_row:
            return Rates(None, 0.0, 1.0, bytes_per_second, token_bytes, self._wait)
        return Rates(per_row, per_row_key, self._fixed_share, bytes_per_second, token_bytes, self._wait)

    def _fit(self, measured: tuple[float, float, float, float], seconds: float) -> None:
        """One step of recursive least squares. It stops forgetting where nothing new is seen, else it would forget all.

        Written out for four: arrays and loops of this size cost several times as much, and every step pays for it.
        """
        a, b, c, d = (value * scale for value, scale in zip(measured, SCALES, strict=True))
        covariance = self._covariance
        p, q, r, s = spread = [w * a + x * b + y * c + z * d for w, x, y, z in covariance]
        weight = FORGETTING + a * p + b * q + c * r + d * s
        e, f, g, h = self._coefficients
        error = (seconds - (e * a + f * b + g * c + h * d)) / weight
        self._coefficients = (e + error * p, f + error * q, g + error * r, h + error * s)
        trace = covariance[0][0] + covariance[1][1] + covariance[2][2] + covariance[3][3]
        more = 1 / FORGETTING if trace < UNSURE else 1.0
        self._covariance = [
            ((w - by * p) * more, (x - by * q) * more, (y - by * r) * more, (z - by * s) * more)
            for (w, x, y, z), by in zip(covariance, [one / weight for one in spread], strict=True)
        ]
