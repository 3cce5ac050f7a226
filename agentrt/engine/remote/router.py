"""Which server a turn goes to: a pure decision over what is believed of each.

The cost of server w for a request of n ids of which it is believed to hold h is in seconds, those of others included:

    J = W + (1 + D) · (T(n - h) + λ · (n - h + g)) + x + E[decode] / rate(b + 1) + S

W: the prompts queued there; T: computing what is not held; D: how many requests wait longer for that, which are those that
come before the server is idle again; λ: pushing out an id of others, 0 while there is room; x: restoring what lies in host
memory; then the turn itself beside b others, and S: how much it slows them down. Without D a request looks after itself
alone: it leaves a queue for an idle server, makes that one compute the whole conversation again, and all are worse off.

A conversation stays where it is unless another server is cheaper by `HYSTERESIS` of the cost of staying.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HYSTERESIS = 0.2
"""Part of the cost of staying that a move must save."""
NEAR = 0.05
"""Servers that cost this much more than the cheapest are as good. Of these the one is taken that holds the most, for what is
computed twice is lost to all; then the least loaded; then the request's own number decides."""
RATE_SECONDS = 10.0
"""Over which the rates of arrivals and of work are averaged."""
NEVER_IDLE = 1e-3
"""A server is believed to compute prompts for all but this part of the time, at most."""
MOST_HELD = 100_000
"""Conversations and prompts that are believed to be held by one server; of more, those used longest ago are forgotten."""
NEEDED_AGAIN = 0.5
"""Of the ids that are pushed out of a full server: the part that is computed again."""


class Rates(NamedTuple):
    """What a server does in a second."""

    prefill: float = 5_000.0
    """Prompt ids."""
    decode: float = 1_000.0
    """Sampled ids, over all turns together."""
    most_decode: float = 50.0
    """Sampled ids of one turn alone."""

    def decode_seconds(self, tokens: float, others: int) -> float:
        """Of a turn of `tokens` ids beside `others` turns."""
        return tokens / min(self.most_decode, self.decode / (others + 1))

    def slowed_seconds(self, tokens: float, others: int) -> float:
        """That `others` turns take longer, all together, beside a turn of `tokens` ids."""
        return tokens * others / self.decode if (others + 1) * self.most_decode > self.decode else 0.0


USUAL = Rates()


class Candidate(NamedTuple):
    """One server, as this request sees it."""

    name: str
    held: int
    """Ids of the request that it is believed to hold, in the session's namespace."""
    queued: float = 0.0
    """Prompt ids that wait there and are not held."""
    running: int = 0
    room_seconds: float = 0.0
    """Until there is room for KV."""
    restore_seconds: float = 0.0
    """For what lies in its host memory."""
    eviction: float = 0.0
    """λ, seconds an id."""
    arrivals: float = 0.0
    """Requests a second that come there."""
    busy: float = 0.0
    """The part of the time that it computes prompts."""
    conversations: int = 0
    """That are there, and come back."""
    version: int = 0
    is_open: bool = True
    """False while it is paused, drained, or lacks the adapter."""
    rates: Rates = USUAL


class Request(NamedTuple):
    """What is to be placed."""

    tokens: int
    expected: float
    """Ids that the turn is expected to sample."""
    growth: float = 0.0
    """g: ids that the conversation is expected to add."""
    oldest_version: int = 0
    """The oldest policy that may sample for it."""
    tie: int = 0


def cost(request: Request, server: Candidate) -> float:
    """J: seconds, lost time of others included."""
    rates, missing = server.rates, request.tokens - server.held
    wait, own = server.queued / rates.prefill + server.room_seconds, missing / rates.prefill
    work = own + server.eviction * (missing + request.growth)
    turn = rates.decode_seconds(request.expected, server.running)
    slowed = rates.slowed_seconds(request.expected, server.running)
    return wait + (1 + delayed(server, wait + own)) * work + server.restore_seconds + turn + slowed


def delayed(server: Candidate, queue_seconds: float) -> float:
    """D: how many requests come before a queue of that length is empty, by the mean busy period of a single server."""
    return min(server.conversations, server.arrivals * queue_seconds / max(1 - server.busy, NEVER_IDLE))


def choose(request: Request, servers: Sequence[Candidate], *, sticky: str | None = None) -> str | None:
    """The server for a request, or None if none may serve it. `sticky`: where its conversation was."""
    able = [server for server in servers if server.is_open and server.version >= request.oldest_version]
    if not able:
        return None
    costs = {server.name: cost(request, server) for server in able}
    best = min(costs.values())
    if sticky in costs and costs[sticky] - best <= HYSTERESIS * costs[sticky]:
        return sticky
    near = [server for server in able if costs[server.name] <= best * (1 + NEAR)]
    most, least = min((-server.held, server.running) for server in near)
    equal = [server.name for server in near if (-server.held, server.running) == (most, least)]
    return equal[request.tie % len(equal)]


def choose_group(request: Request, servers: Sequence[Candidate], members: int) -> list[str | None]:
    """A server for each of `members` samples of one prompt: together, or split where a shorter queue is worth the prefix.

    Each is placed after the ones before it, which hold the prompt where they went and run there.
    """
    state = {server.name: server for server in servers}
    placed: list[str | None] = []
    for _ in range(members):
        name = choose(request, list(state.values()))
        placed.append(name)
        if name is not None:
            server = state[name]
            queued = server.queued + request.tokens - server.held
            state[name] = server._replace(held=request.tokens, queued=queued, running=server.running + 1)
    return placed


@dataclass(slots=True)
class Rate:
    """So much of something a second, over the last `RATE_SECONDS` or so."""

    value: float = 0.0
    at: float = 0.0

    def add(self, amount: float, now: float) -> None:
        """Something came."""
        self.value, self.at = self.seen(now) + amount / RATE_SECONDS, now

    def seen(self, now: float) -> float:
        """What it is by now."""
        return self.value * math.exp((self.at - now) / RATE_SECONDS)


@dataclass(slots=True)
class Belief:
    """What the router believes of one server: its load, and how much it holds of each conversation and group prompt."""

    rates: Rates = USUAL
    held: dict[str, int] = field(default_factory=dict)
    queued: float = 0.0
    running: int = 0
    conversations: int = 0
    """Whose last turn was there; who opens and closes them counts them."""
    is_full: bool = False
    """Something that it was believed to hold had been pushed out, the last time it was asked."""
    arrivals: Rate = field(default_factory=Rate)
    work: Rate = field(default_factory=Rate)
    """Seconds of computing prompts that were sent there."""

    def candidate(self, name: str, keys: Sequence[str], tokens: int, now: float, version: int = 0) -> Candidate:
        """The server as a request sees it that may share what is held under any of `keys`."""
        return Candidate(
            name, max(self.expect(key, tokens) for key in keys), queued=self.queued, running=self.running,
            eviction=NEEDED_AGAIN / self.rates.prefill if self.is_full else 0.0, arrivals=self.arrivals.seen(now),
            busy=self.work.seen(now), conversations=self.conversations, version=version, rates=self.rates,
        )  # fmt: skip

    def expect(self, key: str, tokens: int) -> int:
        """Ids of a prompt of `tokens` that it holds, as far as is known."""
        return min(self.held.get(key, 0), tokens)

    def begin(self, missing: int, now: float, shared: tuple[str, int] | None = None) -> None:
        """A request with so many ids to compute was sent there.

        `shared` is the beginning that others have too: who is queued behind this request will find it computed.
        """
        self.queued += missing
        self.running += 1
        self.arrivals.add(1, now)
        self.work.add(missing / self.rates.prefill, now)
        if shared is not None:
            self.hold(*shared)

    def began(self, missing: int) -> None:
        """Its first id came, so its prompt waits no more."""
        self.queued = max(self.queued - missing, 0.0)

    def end(self, key: str, expected: int, cached: int | None, tokens: int) -> None:
        """The turn of a conversation ended, which has `tokens` ids now.

        If less than `expected` was cached, it had been pushed out, and with it all that was used longer ago.
        """
        self.running -= 1
        if cached is not None:
            self.is_full = cached < expected
            if self.is_full and key in self.held:
                self._forget_before(key)
        self.hold(key, tokens)

    def hold(self, key: str, tokens: int) -> None:
        """It holds `tokens` ids of this; what was used last is the last of `held`."""
        self.held.pop(key, None)
        self.held[key] = tokens
        if len(self.held) > MOST_HELD:
            del self.held[next(iter(self.held))]

    def forget(self, key: str) -> None:
        """Nobody will ask for this any more."""
        self.held.pop(key, None)

    def flush(self) -> None:
        """It holds nothing: it was restarted, flushed, or has new weights."""
        self.held.clear()

    def _forget_before(self, key: str) -> None:
        for older in list(self.held):
            if older == key:
                return
            del self.held[older]
