"""How many episodes an hour 8 servers finish under our router and under the usual rules, in agent traffic.

The bar is as many as the best of the others everywhere. Seen so far: 1.13 times it with long prompts in groups, 0.95 to 0.96 in
chatty traffic and with more KV than room, and 0.70 with many turns, where the threshold rule moves conversations less. Not met.

    python bench/routing.py

A simulation, in no real time: each server computes prompts one after the other, decodes turns side by side at a rate that
they share, and holds what it computed until its room is used up (least recently used first). A fixed number of episodes is
alive; each is a member of a group with a common prompt and alternates turns with tools. All routers see the same: their own
requests and what each reply says, never a server's cache. Printed: episodes an hour for each traffic and router, the median
of 3 seeds, and ours over the best of the others.
"""

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from statistics import median
from typing import NamedTuple

from agentrt.engine.remote.router import Belief, Candidate, Rates, Request, choose

SERVERS = 8
RATES = Rates(prefill=8_000, decode=2_400, most_decode=60)


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
    episodes: int = 600


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
    group: str
    tokens: int
    sampled: int


class Server:
    """One simulated server: the truth that no router sees."""

    def __init__(self, room: int) -> None:
        self.free_at = 0.0
        self.running = 0
        self._held: OrderedDict[str, int] = OrderedDict()
        self._used, self._room = 0, room

    def begin(self, now: float, turn: Turn, prompt: int) -> tuple[float, int]:
        """When the turn's prompt is computed, and how much of it was held."""
        cached = min(max(self._get(str(turn.episode)), min(self._get(turn.group), prompt)), turn.tokens)
        self.free_at = max(self.free_at, now) + (turn.tokens - cached) / RATES.prefill
        self._hold(turn.group, prompt)
        self._hold(str(turn.episode), turn.tokens + turn.sampled)
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

    def __init__(self, rule: "Rule") -> None:
        self.rule = rule
        self.beliefs = [Belief() for _ in range(SERVERS)]
        self.is_full = [False] * SERVERS
        """The last reply had less cached than was expected: what comes pushes out what others need."""
        self.where: dict[int, int] = {}
        self.turns = 0

    def place(self, turn: Turn) -> int:
        self.turns += 1
        at = self.where[turn.episode] = self.rule(self, turn)
        return at

    def held(self, server: int, turn: Turn) -> int:
        belief = self.beliefs[server]
        return max(belief.expect(f"{turn.episode}", turn.tokens), belief.expect(turn.group, turn.tokens))


Rule = Callable[[Router, Turn], int]


def round_robin(router: Router, turn: Turn) -> int:
    return router.turns % SERVERS


def least_load(router: Router, turn: Turn) -> int:
    return min(range(SERVERS), key=lambda server: router.beliefs[server].running)


def pure_affinity(router: Router, turn: Turn) -> int:
    """Where most of it is held, whatever waits there; nowhere: the least loaded."""
    return max(range(SERVERS), key=lambda server: (router.held(server, turn), -router.beliefs[server].running))


def threshold(router: Router, turn: Turn) -> int:
    """SGLang's gateway: balance if the loads differ by over 32 and by over 10 %, else a match of over half."""
    loads = [belief.running for belief in router.beliefs]
    best = pure_affinity(router, turn)
    is_imbalanced = max(loads) - min(loads) > 32 and max(loads) > 1.1 * min(loads)
    return best if not is_imbalanced and router.held(best, turn) > 0.5 * turn.tokens else least_load(router, turn)


def ours(router: Router, turn: Turn) -> int:
    candidates = [
        Candidate(
            str(server), router.held(server, turn), queued=belief.queued, running=belief.running, rates=RATES,
            eviction=0.5 / RATES.prefill if router.is_full[server] else 0.0,
        )
        for server, belief in enumerate(router.beliefs)
    ]  # fmt: skip
    sticky = router.where.get(turn.episode)
    request = Request(turn.tokens, turn.sampled, growth=turn.sampled, tie=turn.episode)
    name = choose(request, candidates, sticky=None if sticky is None else str(sticky))
    assert name is not None
    return int(name)


RULES: dict[str, Rule] = {
    "round robin": round_robin, "least load": least_load, "affinity": pure_affinity, "threshold": threshold, "ours": ours,
}  # fmt: skip


def episodes_an_hour(traffic: Traffic, rule: Rule, seed: int) -> float:
    """Run the traffic through; episodes an hour of simulated time."""
    draw, order = random.Random(seed), count()
    servers = [Server(traffic.room) for _ in range(SERVERS)]
    router = Router(rule)
    events: list[tuple[float, int, Iterator[float]]] = []
    waiting = iter(range(traffic.episodes))
    ended = 0.0

    def episode(number: int) -> Iterator[float]:
        """Yields the time of what comes next; told the time by `now`."""
        tokens = traffic.prompt
        for _ in range(max(1, round(draw.expovariate(1 / traffic.turns)))):
            sampled = max(1, round(draw.expovariate(1 / traffic.sampled)))
            turn = Turn(number, f"group {number // traffic.group}", tokens, sampled)
            at = router.place(turn)
            server, belief = servers[at], router.beliefs[at]
            expected = router.held(at, turn)
            belief.begin(turn.tokens - expected)
            computed, cached = server.begin(now, turn, traffic.prompt)
            yield computed
            belief.began(turn.tokens - expected)
            server.running += 1
            yield now + RATES.decode_seconds(sampled, server.running - 1)
            server.running -= 1
            tokens += sampled
            belief.end(f"{number}", expected, cached, tokens)
            router.is_full[at] = cached < expected
            belief.hold(turn.group, traffic.prompt)
            yield now + draw.expovariate(1 / traffic.tool_seconds)
            tokens += round(draw.expovariate(1 / traffic.observed))

    def start(at: float) -> None:
        number = next(waiting, None)
        if number is not None:
            heapq.heappush(events, (at, next(order), episode(number)))

    for _ in range(traffic.alive):
        start(0.0)
    while events:
        now, _, running = heapq.heappop(events)
        following = next(running, None)
        if following is None:
            ended = now
            start(now)
        else:
            heapq.heappush(events, (following, next(order), running))
    return 3600 * traffic.episodes / ended


def main(traffics: Sequence[Traffic] = TRAFFICS) -> None:
    print(f"{'episodes/h':28}" + "".join(f"{name:>13}" for name in RULES) + f"{'ours/best':>12}")
    for traffic in traffics:
        found = {
            name: median(episodes_an_hour(traffic, rule, seed) for seed in range(3)) for name, rule in RULES.items()
        }
        best = max(value for name, value in found.items() if name != "ours")
        cells = "".join(f"{value:13.0f}" for value in found.values())
        print(f"{traffic.name:28}{cells}{found['ours'] / best:12.2f}", flush=True)


if __name__ == "__main__":
    main()
