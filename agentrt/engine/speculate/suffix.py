"""Drafts from text: what followed, wherever the last ids of a sequence stood before.

`Memory` remembers the ids that the engine has seen lately, of every conversation: the prompt, the tool result that just
arrived, the turns of the group's other members, and the last epoch's rollouts of the same task. A match may begin
anywhere, and the longest one wins, so a sibling's text is found before a stranger's by the prompt they share. Several
matches of that length vote; where they disagree, a draft can branch.

A look goes over all requests at once in compiled code, and that knows how often drafts of each *kind* stood until now (how long
the match is, and how many such matches agree): what is not worth verifying is not even made an object of.

A ring of ids with hash chains, as LZ77 coders have them: `chains[o][p]` is the place before p with the same hash of the
`ORDERS[o]` ids that end there. 20 bytes an id, and a look-up costs microseconds.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrt.core.tokens import IntArray
from agentrt_kernels.compiled import ordered

CAPACITY = 1 << 19
"""Ids that are remembered; a power of two."""
HEADS = 1 << 16
ORDERS = (8, 3)
"""Lengths that a match has at least; the longer one is tried first, so that frequent short ones do not hide it."""
LONGEST = 32
"""Ids that a match is followed back; beyond, all count as equally long."""
CANDIDATES = 16
"""Places that are looked at, the newest first. Each is a walk through memory that is in no cache."""
MOST_UNREAD = 64
"""Texts that are read together at most."""
APART = -1
"""Lies between two texts; nothing matches it."""
FOUND = 3
"""Columns of a look's table before the ids that were found: how many there are, `matched`, `agreed`."""
SIDE = 2
"""Columns of a branch before its ids: how many there are, and after how many of the others it begins."""


FEW = 4
"""Matches; as many agree as *many*."""
VOTERS = ("split", "one match", "few agreed", "many agreed")
OCTAVES = LONGEST.bit_length() + 1
KINDS = tuple(f"text, {voters}, {1 << octave >> 1} and more" for voters in VOTERS for octave in range(OCTAVES))
"""Drafts from text that are accepted alike: by how many matches agreed, if all did, and by the match's length, in octaves."""


class Found(NamedTuple):
    """What followed the longest match."""

    ids: list[int]
    matched: int
    """Ids of the match, at most `LONGEST`; 0 if there is none."""
    agreed: int
    """How many matches of that length there are, if all went on with the same id; else 0."""
    branches: list[tuple[int, list[int]]] = []
    """What others went on with, and after how many of `ids`."""

    @property
    def kind(self) -> str:
        return KINDS[_named(self.matched, self.agreed)]


NOTHING = Found([], 0, 0)
SURE = np.ones((len(KINDS), 1))


class Memory:
    """Texts, and what followed in them."""

    def __init__(self, capacity: int = CAPACITY, branches: int = 1) -> None:
        """`branches` are how many ways `find` may say that a text goes on."""
        self.branches = branches
        self._ring = np.full(capacity, APART, dtype=np.int32)
        self._chains = np.full((len(ORDERS), capacity), -1, dtype=np.int64)
        self._heads = np.full((len(ORDERS), HEADS), -1, dtype=np.int64)
        self._end = 0
        self._unread: list[tuple[IntArray, int, int, bool]] = []
        """Texts as `add` got them: where they start and stop."""
        self._prompts: dict[bytes, int] = {}
        """Where a text lies that may be given many times: members of a group share their prompt."""

    def add(self, ids: IntArray, start: int, *, once: bool = False) -> None:
        """Remember `ids[start:]`, and that it follows what stands before. With `once` not if it is remembered already.

        What stands in `ids` now must stay there. It is read when somebody looks, or when there is much to read.
        """
        if len(ids) > start:
            self._unread.append((ids, start, len(ids), once))
            if len(self._unread) == MOST_UNREAD:
                self._read()

    def find(
        self, texts: Sequence[IntArray], limits: Sequence[int], survivals_KJ: NDArray[np.float64] = SURE, least: float = 0.0
    ) -> list[Found]:  # fmt: skip
        """What may follow each of these, at most so many ids of it, as long as they stand no less often than `least`.

        `survivals_KJ` are how often at least the first j + 1 ids of each of `KINDS` stand, by default always.
        """
        count, longest = len(texts), max(limits, default=0)
        if longest < 1:
            return [NOTHING] * count
        if self._unread:
            self._read()
        tails = [ids[-LONGEST:] for ids in texts]
        asked = IntArray("i", [*map(len, tails), *limits])
        found_SC = np.empty((count, FOUND + longest + (self.branches - 1) * (SIDE + longest)), dtype=np.int64)
        _find(
            self._ring, self._chains, self._heads, self._end, np.frombuffer(b"".join((asked, *tails)), dtype=np.int32),
            found_SC, longest, survivals_KJ, least,
        )  # fmt: skip
        rows = found_SC.tolist()
        if self.branches == 1:
            return [Found(row[FOUND : FOUND + row[0]], row[1], row[2]) if row[0] else NOTHING for row in rows]
        return [_branching(row, longest) if row[0] else NOTHING for row in rows]

    def _read(self) -> None:
        """Remember what was added."""
        begin, texts, sizes = self._end, list[IntArray](), list[tuple[int, int]]()
        for ids, start, stop, once in self._unread:
            if not (once and self._is_known(ids[start:stop])):
                first = max(0, start - LONGEST)
                texts.append(ids[first:stop][-len(self._ring) // 2 :])
                sizes.append((len(texts[-1]), start - first))
                self._end += len(texts[-1]) + 1
        if texts:
            text_T = np.frombuffer(b"".join(texts), dtype=np.int32)
            _append(self._ring, self._chains, self._heads, begin, text_T, np.array(sizes))
        self._unread.clear()

    def _is_known(self, text: IntArray) -> bool:
        """Whether this text was added in the last half of the ring; if not, that it is now."""
        key = text.tobytes()
        added = self._prompts.pop(key, None)
        is_known = added is not None and added > self._end - len(self._ring) // 2
        self._prompts[key] = added if added is not None and is_known else self._end
        if len(self._prompts) > len(self._ring) // 64:
            del self._prompts[next(iter(self._prompts))]
        return is_known


def _branching(row: list[int], longest: int) -> Found:
    """From a row of a look's table."""
    starts = range(FOUND + longest, len(row), SIDE + longest)
    sides = [(row[at + 1], row[at + SIDE : at + SIDE + row[at]]) for at in starts if row[at]]
    return Found(row[FOUND : FOUND + row[0]], row[1], row[2], sides)


@ordered()
def _append(ring: Any, chains: Any, heads: Any, end: int, text_T: Any, sizes_S2: Any) -> None:
    """Write texts, one after another: of each the length, and how many of its first ids stand elsewhere already."""
    first = 0
    for s in range(sizes_S2.shape[0]):
        length, known = sizes_S2[s]
        _append_one(ring, chains, heads, end, text_T[first : first + length], known)
        first, end = first + length, end + length + 1


@ordered()
def _append_one(ring: Any, chains: Any, heads: Any, end: int, text: Any, known: int) -> None:
    size = ring.shape[0]
    for i in range(text.shape[0]):
        ring[(end + i) % size] = text[i]
    for which in range(len(ORDERS)):
        order = ORDERS[which]
        for last in range(max(order, known) - 1, text.shape[0] - 1):  # the last id has nothing after it
            slot = _hash(text, last + 1, order)
            chains[which, (end + last) % size] = heads[which, slot]
            heads[which, slot] = end + last
    ring[(end + text.shape[0]) % size] = APART


@ordered()
def _hash(ids: Any, end: int, order: int) -> Any:
    """Of the `order` ids before `end`."""
    mixed = np.uint64(1469598103934665603)
    for i in range(end - order, end):
        mixed = (mixed ^ np.uint64(ids[i])) * np.uint64(1099511628211)
    return np.int64((mixed ^ (mixed >> np.uint64(32))) % np.uint64(HEADS))


@ordered()
def _kind(matched: int, agreed: int) -> int:
    """Which of `KINDS`."""
    octave, voters = 0, min(agreed, 2) if agreed < FEW else 3
    while matched >> octave:
        octave += 1
    return voters * OCTAVES + octave


_named = cache(_kind)
"""From Python, where a compiled call takes longer than the sum."""


@ordered()
def _find(
    ring: Any, chains: Any, heads: Any, end: int, asked_T: Any, found_SC: Any, longest: int, survivals_KJ: Any, least: float
) -> None:  # fmt: skip
    """`asked_T` has the lengths of the tails, then how many ids may follow each, then the tails."""
    count = found_SC.shape[0]
    sides, first = (found_SC.shape[1] - FOUND - longest) // (SIDE + longest), 2 * count
    orders = len(ORDERS) if _short_ones_pay(survivals_KJ, least) else len(ORDERS) - 1
    for s in range(count):
        tail = asked_T[first : first + asked_T[s]]
        first += asked_T[s]
        out_K = found_SC[s, FOUND : FOUND + max(asked_T[count + s], 0)]
        sides_BC = found_SC[s, FOUND + longest :].reshape((sides, SIDE + longest))
        found_SC[s, 0], found_SC[s, 1], found_SC[s, 2] = _follow(
            ring, chains, heads, end, orders, tail, out_K, sides_BC, survivals_KJ, least
        )


@ordered()
def _short_ones_pay(survivals_KJ: Any, least: float) -> bool:
    """Whether a match that the longer orders do not find can be worth a row."""
    for length in range(ORDERS[-1], ORDERS[-2]):
        for agreed in (0, 1, 2, FEW):
            if survivals_KJ[_kind(length, agreed), 0] >= least:
                return True
    return False


@ordered()
def _worth(survival_J: Any, least: float, most: int) -> int:
    """How many ids of a draft stand no less often than `least`. What is not known of a depth is said of the one before."""
    count = 0
    while count < most and survival_J[min(count, survival_J.shape[0] - 1)] >= least:
        count += 1
    return count


@ordered()
def _follow(
    ring: Any, chains: Any, heads: Any, end: int, orders: int, tail: Any, out: Any, sides_BC: Any, survivals_KJ: Any,
    least: float,
) -> Any:  # fmt: skip
    """Fill `out`; how many ids, the length of the match, and how many there are if all agreed on the first.

    `sides_BC` are filled with what the next most texts have, from each place on where they disagree: how many ids, after
    how many of `out`, and the ids.
    """
    sides_BC[:, 0] = 0
    places, lengths = np.empty(CANDIDATES, dtype=np.int64), np.empty(CANDIDATES, dtype=np.int64)
    found = 0
    for which in range(orders):
        if found == 0 and tail.shape[0] >= ORDERS[which]:
            found = _matches(ring, chains[which], heads[which], end, tail, ORDERS[which], places, lengths)
    longest, live = 0, 0
    for i in range(found):
        longest = max(longest, lengths[i])
    for i in range(found):
        if lengths[i] == longest:
            places[live] = places[i]
            live += 1
    count, agreed, sides, room = 0, 0, 0, out.shape[0]
    while count < room and live > 0:
        winner, votes, voters = _vote(ring, end, places, live, count + 1, APART)
        if count == 0:
            agreed = voters if votes == voters else 0
            room = _worth(survivals_KJ[_kind(longest, agreed)], least, room)
            if room == 0:
                break
        # A chain that agreed until here ends where it would be another kind of draft; a tree goes on both ways.
        goes_on = 2 * votes >= voters and (agreed == 0 or votes == voters or sides_BC.shape[0] > 0)
        if votes < voters and sides < sides_BC.shape[0]:
            other = _vote(ring, end, places, live, count + 1, winner)[0] if goes_on else winner
            others = places[:live].copy()
            kept = _keep(ring, others, live, count + 1, other)
            sides_BC[sides, 0] = _straight(ring, end, others, kept, count, sides_BC[sides, SIDE : SIDE + out.shape[0]])
            sides_BC[sides, 1] = count
            sides += 1
        if voters == 0 or not goes_on:
            break
        out[count] = winner
        count += 1
        live = _keep(ring, places, live, count, winner)
    return count, longest, agreed


@ordered()
def _straight(ring: Any, end: int, places: Any, live: int, before: int, out: Any) -> int:
    """Fill `out` with what most texts have, `before` ids after their match; how many ids. It has room for those before too."""
    count = 0
    while before + count < out.shape[0] and live > 0:
        winner, votes, voters = _vote(ring, end, places, live, before + count + 1, APART)
        if 2 * votes < voters or voters == 0:
            break
        out[count] = winner
        count += 1
        live = _keep(ring, places, live, before + count, winner)
    return count


@ordered()
def _matches(ring: Any, chain: Any, heads: Any, end: int, tail: Any, order: int, places: Any, lengths: Any) -> int:
    """Places whose ids, back from there, are the tail's, `order` of them at least; the newest first."""
    size, found = ring.shape[0], 0
    place = heads[_hash(tail, tail.shape[0], order)]
    for _ in range(2 * CANDIDATES):
        if place < 0 or place <= end - size + LONGEST or found == CANDIDATES:
            break
        length = 0
        while length < tail.shape[0] and ring[(place - length) % size] == tail[tail.shape[0] - 1 - length]:
            length += 1
        if length >= order:
            places[found], lengths[found] = place, length
            found += 1
        place = chain[place % size]
    return found


@ordered()
def _vote(ring: Any, end: int, places: Any, live: int, ahead: int, but: int) -> Any:
    """The id, other than `but`, that most texts have `ahead` of their match, the newest of equals; its votes, and all votes."""
    winner, most, voters = APART, 0, 0
    for i in range(live):
        candidate = ring[(places[i] + ahead) % ring.shape[0]]
        if candidate == APART or places[i] + ahead >= end:
            continue
        voters += 1
        if candidate == but:
            continue
        votes = 0
        for j in range(live):
            if places[j] + ahead < end and ring[(places[j] + ahead) % ring.shape[0]] == candidate:
                votes += 1
        if votes > most:
            winner, most = candidate, votes
    return winner, most, voters


@ordered()
def _keep(ring: Any, places: Any, live: int, ahead: int, winner: int) -> int:
    """Drop the texts that went on with another id."""
    kept = 0
    for i in range(live):
        if ring[(places[i] + ahead) % ring.shape[0]] == winner:
            places[kept] = places[i]
            kept += 1
    return kept
