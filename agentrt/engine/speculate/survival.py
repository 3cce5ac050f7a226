"""How many ids of a draft stand, by kind of draft and by depth. Pure."""

RENEWED = 8
"""Verifications of a kind after which its curve is made anew; sooner while there are fewer than so many."""
FORGET = 0.98
"""Of what is known, at each verification: the last 50 or so count."""
PRIOR, PRIOR_WEIGHT = 0.7, 2.0
"""The share that is assumed before anything is known, good enough to be tried; and the ids that this counts as."""


class Survival:
    """How often the first ids of drafts of one kind stand.

    The product over depths of how often an id stood where all before it did. That share differs by depth: a draft
    that went well is likely to go on so. Drafts of any length count at the depths that they reached (Kaplan and Meier).
    """

    __slots__ = ("_curve", "_noted", "_reached", "_stood")

    def __init__(self) -> None:
        self._reached: list[float] = []
        self._stood: list[float] = []
        self._curve: list[float] = []
        self._noted = RENEWED
        """Drafts since the curve was made; `RENEWED` if it is to be made anew."""

    def note(self, proposed: int, accepted: int) -> bool:
        """A draft of `proposed` ids was verified; the first `accepted` of them stood. Whether `curve` is made anew now."""
        for depth in range(min(accepted + 1, proposed)):
            if depth == len(self._reached):
                self._reached.append(0.0)
                self._stood.append(0.0)
            self._reached[depth] = FORGET * self._reached[depth] + 1
            self._stood[depth] = FORGET * self._stood[depth] + (depth < accepted)
        self._noted += 1 if self._reached[0] > RENEWED else RENEWED
        return self._noted >= RENEWED

    def curve(self, length: int) -> list[float]:
        """How often at least the first j + 1 ids stand, j below `length`. A depth that is not known is like the one before."""
        if self._noted >= RENEWED or len(self._curve) != length:
            share, survival, curve = PRIOR, 1.0, list[float]()
            for depth in range(length):
                if depth < len(self._reached):
                    stood, reached = self._stood[depth], self._reached[depth]
                    share = (stood + PRIOR_WEIGHT * share) / (reached + PRIOR_WEIGHT)
                survival *= share
                curve.append(survival)
            self._curve, self._noted = curve, 0
        return self._curve
