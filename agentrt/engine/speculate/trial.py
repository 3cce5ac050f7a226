"""`Trial`: whether a draft model is worth following, by what came of it. Pure; it is told what steps took.

The gate weighs each pass of a draft model, but not what it costs to be able to draft: prompts that it must read too, hidden
states that are handed out and kept. So what a model promises is held against what came of it: over some steps, the seconds
that their ids would have taken in plain steps, and the seconds that they took, everything included; and the same while the
model was not followed, where drafts from text may pay by themselves. One that does not do better rests, for longer each time,
and is not fed meanwhile.
"""

PAYS_FROM = 1.03
"""Times what is gained without it."""
STEPS = 64
"""That only decode, after which a trial is judged; while a model is in use, the last so many count."""
FIRST_REST, LONGEST_REST = 4096, 1 << 20
"""Steps; twice as long after each trial that failed."""


class _Ledger:
    """What the ids of some steps would have taken, over what they took."""

    def __init__(self) -> None:
        self.steps = 0
        self._plain = self._spent = 0.0

    def note(self, plain: float, spent: float) -> None:
        self.steps += 1
        keep = 1 - 1 / STEPS
        self._plain, self._spent = keep * self._plain + plain, keep * self._spent + spent

    @property
    def gain(self) -> float:
        return self._plain / self._spent if self._spent else 1.0


class Trial:
    """Of one draft model, which is tried from the start."""

    def __init__(self) -> None:
        self._with, self._without = _Ledger(), _Ledger()
        self._rest, self._left = FIRST_REST, 0

    @property
    def is_on(self) -> bool:
        """The model is to be followed: it is being tried, or in use."""
        return self._left == 0

    def note(self, plain: float, spent: float) -> None:
        """A step that only decodes took so long, and its ids would have taken `plain` seconds in plain steps."""
        if self._left:
            self._without.note(plain, spent)
            self._left -= 1
            return
        self._with.note(plain, spent)
        if self._with.steps >= STEPS and self._with.gain < PAYS_FROM * max(self._without.gain, 1.0):
            self.fail()

    def fail(self) -> None:
        """It does not pay: let it rest."""
        self._with, self._left, self._rest = _Ledger(), self._rest, min(2 * self._rest, LONGEST_REST)

    def begin(self) -> None:
        """Try it now, as if it had never been tried: it was trained again."""
        self._with, self._left, self._rest = _Ledger(), 0, FIRST_REST
