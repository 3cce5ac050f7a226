"""How many episodes an hour 8 servers finish under our router and under the usual rules, in agent traffic.

    python bench/routing.py

A simulation, in no real time: each server computes prompts one after the other, decodes turns side by side at a rate that
they share, and holds what it computed until its room is used up (least recently used first; a group's prompt is there once).
A fixed number of episodes is alive; each is a member of a group with a common prompt and alternates turns with tools. All
rules see the same episodes and know the same: their own requests, the room that each server says it has, and what each reply
says, never a server's cache; a prompt that was sent to a server is believed to be there from then on. Printed: episodes an
hour over three times as many ends as episodes are alive, after as many, the mean of 5 seeds for each traffic and rule, and
ours over the best of the others, by seed, with the standard error; first on equal servers, then on a cluster of which two are
of an older kind, with half the speed, which our router is told and the others have no use for.

Seen: 1.004, 1.36, 1.000, 1.38 and 1.007 of the best on equal servers, 1.024, 1.24, 1.123, 1.49 and 1.032 on the other cluster,
standard errors 0.000 to 0.011 but for many turns (0.18, 0.12) and the fourth of the other (0.04). The bars: nowhere below the
best, and 1.1 times it in two traffics.
"""

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from statistics import mean, stdev
from typing import NamedTuple

from agentrt.engine.remote.router import Belief, Rates, Request, Who, choose

RATES = Rates(prefill=8_000, decode=2_400, most_decode=60)
OLDER = Rates(prefill=4_000, decode=1_200, most_decode=30)
CLUSTERS = {"8 equal servers": [RATES] * 8, "6 servers and 2 of half the speed": [RATES] * 6 + [OLDER] * 2}


class Traffic(NamedTuple):
    """What the episodes are like. Lengths are means of an exponential law, but for the prompt."""

    name: str
    prompt: int
    """Ids, the same for a group."""
    group: int
    turns: int
    sampled: int
    observed: int
    tool_seconds: float
    alive: int
    room: int
    """Ids that a server can hold."""


TRAFFICS = (
    Traffic("long prompts, groups of 8", 12_000, 8, 4, 150, 300, 2.0, 256, 600_000),
    Traffic("many turns", 1_500, 8, 20, 120, 700, 3.0, 256, 600_000),
    Traffic("short and chatty", 300, 8, 8, 250, 60, 1.0, 256, 600_000),
    Traffic("more KV than room", 3_000, 4, 15, 100, 900, 8.0, 384, 150_000),
    Traffic("one group dominates", 16_000, 64, 3, 200, 200, 1.0, 256, 600_000),
)


class Turn(NamedTuple):
    """One request as the routers see it."""

    episode: int
    who: Who
    tokens: int
    expected: int
    """Ids that it will sample, as far as anybody knows: the mean."""


class Server:
    """One simulated server: the truth that no router sees."""

    def __init__(self, room: int, rates: Rates) -> None:
        self.rates, self.free_at, self.running = rates, 0.0, 0
        self._held: OrderedDict[str, int] = OrderedDict()
        self._used, self._room = 0, room

    def begin(self, now: float, turn: Turn, sampled: int) -> tuple[float, int]:
        """When the turn's prompt is computed, and how much of it was held: a group's prompt is there once."""
        who, shared = turn.who, self._get(turn.who.group)
        cached = min(shared + self._get(who.key), turn.tokens) if shared else 0
        self.free_at = max(self.free_at, now) + (turn.tokens - cached) / self.rates.prefill
        self._hold(who.key, turn.tokens + sampled - who.prompt)
        self._hold(who.group, who.prompt)
        return self.free_at, cached

    def _get(self, key: str) -> int:
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key, 0)

    def _hold(self, key: str, tokens: int) -> None:
        self._used += tokens - self._held.get(key, 0)
        self._held[key] = tokens
        self._held.move_to_end(key)
        while self._used > self._room and len(self._held) > 1:
            self._used -= self._held.popitem(last=False)[1]


class Router:
    """What a rule knows: its own requests, and what the replies said."""

    def __init__(self, rule: "Rule", rates: Sequence[Rates], room: int) -> None:
        self._rule = rule
        self.beliefs = [Belief(rates=one, room=room) for one in rates]
        self.where: dict[int, int] = {}
        """Where each conversation was last."""
        self.turns, self.now = 0, 0.0

    def place(self, turn: Turn, now: float) -> int | None:
        """The server of a turn; None: it waits."""
        self.now = now
        at = self._rule(self, turn)
        if at is None:
            return None
        before, self.turns = self.where.get(turn.episode, at), self.turns + 1
        if before != at:
            self.beliefs[before].leave(turn.who.key)
        self.where[turn.episode] = at
        return at

    def end(self, turn: Turn) -> None:
        """A conversation has ended."""
        self.beliefs[self.where.pop(turn.episode)].leave(turn.who.key)
        for belief in self.beliefs:
            belief.forget(turn.who.key)

    def held(self, server: int, turn: Turn) -> int:
        """Ids of a turn that are believed to be there."""
        return self.beliefs[server].expect(turn.who, turn.tokens)


Rule = Callable[[Router, Turn], int | None]


def round_robin(router: Router, turn: Turn) -> int:
    return router.turns % len(router.beliefs)


def least_load(router: Router, turn: Turn) -> int:
    return min(range(len(router.beliefs)), key=lambda server: router.beliefs[server].running)


def pure_affinity(router: Router, turn: Turn) -> int:
    """Where most of it is held, whatever waits there; nowhere: the least loaded."""
    return max(
        range(len(router.beliefs)), key=lambda server: (router.held(server, turn), -router.beliefs[server].running)
    )


def threshold(router: Router, turn: Turn) -> int:
    """SGLang's gateway: balance if the loads differ by over 32 and by over 10 %, else a match of over half."""
    loads = [belief.running for belief in router.beliefs]
    best = pure_affinity(router, turn)
    is_imbalanced = max(loads) - min(loads) > 32 and max(loads) > 1.1 * min(loads)
    return best if not is_imbalanced and router.held(best, turn) > 0.5 * turn.tokens else least_load(router, turn)


def ours(router: Router, turn: Turn) -> int | None:
    candidates = [
        belief.candidate(str(server), turn.who, turn.tokens, router.now) for server, belief in enumerate(router.beliefs)
    ]
    sticky = router.where.get(turn.episode)
    request = Request(turn.tokens, turn.expected, growth=turn.expected, tie=turn.episode)
    name = choose(request, candidates, sticky=None if sticky is None else str(sticky))
    return None if name is None else int(name)


RULES: dict[str, Rule] = {
    "round robin": round_robin, "least load": least_load, "affinity": pure_affinity, "threshold": threshold, "ours": ours,
}  # fmt: skip


def episodes_an_hour(traffic: Traffic, rule: Rule, rates: Sequence[Rates], seed: int) -> float:
    """Episodes an hour of simulated time, once as many as are alive have ended; others take the place of those that end.

    Turns that a rule has wait are asked about again after each event, those of the oldest episode first.
    """
    order, numbers, now = count(), count(), 0.0
    servers = [Server(traffic.room, one) for one in rates]
    router = Router(rule, rates, traffic.room)
    events: list[tuple[float, int, int, Iterator[float | None]]] = []
    waiting: list[tuple[int, Iterator[float | None]]] = []
    ends: list[float] = []

    def episode(number: int) -> Iterator[float | None]:
        """Yields the time of what comes next; None: it waits. Its own draws, so that every rule has the same episodes."""
        draw, tokens = random.Random(f"{seed} {number}"), traffic.prompt
        who = Who(f"episode {number}", f"group {number // traffic.group}", traffic.prompt)
        for _ in range(max(1, round(draw.expovariate(1 / traffic.turns)))):
            sampled = max(1, round(draw.expovariate(1 / traffic.sampled)))
            turn = Turn(number, who, tokens, traffic.sampled)
            while (at := router.place(turn, now)) is None:
                yield None
            server, belief = servers[at], router.beliefs[at]
            visit = belief.begin(who, tokens, now)
            computed, cached = server.begin(now, turn, sampled)
            yield computed
            belief.began(visit)
            server.running += 1
            yield now + server.rates.decode_seconds(sampled, server.running - 1)
            server.running -= 1
            tokens += sampled
            belief.end(visit, cached, tokens, now)
            yield now + draw.expovariate(1 / traffic.tool_seconds)
            tokens += round(draw.expovariate(1 / traffic.observed))
        router.end(turn)

    def go_on(number: int, running: Iterator[float | None]) -> bool:
        """Until its next event. Whether something changed: False if it waits."""
        try:
            following = next(running)
        except StopIteration:
            ends.append(now)
            start(now)
            return True
        if following is None:
            heapq.heappush(waiting, (number, running))
            return False
        heapq.heappush(events, (following, next(order), number, running))
        return True

    def start(at: float) -> None:
        number = next(numbers)
        heapq.heappush(events, (at, next(order), number, episode(number)))

    for _ in range(traffic.alive):
        start(0.0)
    first, last = traffic.alive, traffic.alive * 4
    while len(ends) <= last:
        now, _, number, running = heapq.heappop(events)
        go_on(number, running)
        while waiting and go_on(*heapq.heappop(waiting)):
            pass
    return 3600 * (last - first) / (ends[last] - ends[first])


def main(traffics: Sequence[Traffic] = TRAFFICS, seeds: Sequence[int] = range(5)) -> None:
    for cluster, rates in CLUSTERS.items():
        print(f"{cluster:34}" + "".join(f"{name:>13}" for name in RULES) + f"{'ours/best':>18}")
        for traffic in traffics:
            found = {
                name: [episodes_an_hour(traffic, rule, rates, seed) for seed in seeds] for name, rule in RULES.items()
            }
            best = max((name for name in found if name != "ours"), key=lambda name: mean(found[name]))
            ratios = [mine / other for mine, other in zip(found["ours"], found[best], strict=True)]
            cells = "".join(f"{mean(values):13.0f}" for values in found.values())
            error = stdev(ratios) / len(ratios) ** 0.5
            print(f"{traffic.name:34}{cells}{mean(ratios):11.3f} ± {error:.3f}", flush=True)


if __name__ == "__main__":
    main()
