"""How many ids of a draft stand: by kind of draft and by depth, and of one request compared to its kind. Pure."""

from itertools import accumulate

RENEWED = 8
"""Verifications of a kind after which its curve is made anew; sooner while there are fewer than so many."""
FORGET = 0.98
"""Of what is known, at each verification: the last 50 or so count."""
PRIOR, PRIOR_WEIGHT = 0.7, 2.0
"""The share that is assumed before anything is known, good enough to be tried; and the ids that this counts as."""
REQUEST_WEIGHT = 4.0
"""Accepted ids that count as a request's own, so that one with few of them is judged by its kind."""

KEPT = 0.95
"""Of a request's standing, at each look."""
LIKE_OTHERS = 2.0
"""Looks that it counts as that a request is like the others."""


class Survival:
    """How often the first ids of drafts of one kind stand.

    The product over depths of how often an id stood where all before it did. That share differs by depth: a draft
    that went well is likely to go on so. Drafts of any length count at the depths that they reached (Kaplan and Meier).
    """

    __slots__ = ("_curve", "_noted", "_reached", "_stood", "_sums")

    def __init__(self) -> None:
        self._reached: list[float] = []
        self._stood: list[float] = []
        self._curve: list[float] = []
        self._sums = [0.0]
        self._noted = RENEWED
        """Drafts since the curve was made; `RENEWED` if it is to be made anew."""

    def note(self, proposed: int, accepted: int) -> None:
        """A draft of `proposed` ids was verified; the first `accepted` of them stood."""
        for depth in range(min(accepted + 1, proposed)):
            if depth == len(self._reached):
                self._reached.append(0.0)
                self._stood.append(0.0)
            self._reached[depth] = FORGET * self._reached[depth] + 1
            self._stood[depth] = FORGET * self._stood[depth] + (depth < accepted)
        self._noted += 1 if self._reached[0] > RENEWED else RENEWED

    def expected(self, proposed: int) -> float:
        """How many of so many ids stand on average, by the last `curve` that was asked for."""
        return self._sums[min(proposed, len(self._sums) - 1)]

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
            self._curve, self._sums, self._noted = curve, list(accumulate(curve, initial=0.0)), 0
        return self._curve


class Standing:
    """What drafts of a request promise on average, whoever has one just now.

    In a batch whose requests are done together it matters who gains: where one repeats itself and seven do not, drafts for
    that one bring the end no nearer. Until something is known of a request it is taken for one like the others.
    """

    __slots__ = ("_looks", "_promised")

    def __init__(self) -> None:
        self._looks = self._promised = 0.0

    def note(self, promised: float, others: float) -> float:
        """A draft was looked for that promises so many ids, of the batch's requests on average `others`; the standing."""
        self._looks = KEPT * self._looks + 1
        self._promised = KEPT * self._promised + promised
        return (self._promised + LIKE_OTHERS * others) / (self._looks + LIKE_OTHERS)


class Own:
    """How a request's drafts fared beside what their kinds let expect."""

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._accepted = self._expected = REQUEST_WEIGHT

    def note(self, accepted: int, expected: float) -> None:
        """So many ids of a draft stood, and so many were expected to."""
        self._accepted += accepted
        self._expected += expected

    @property
    def factor(self) -> float:
        """Times what its kind lets expect."""
        return self._accepted / self._expected
