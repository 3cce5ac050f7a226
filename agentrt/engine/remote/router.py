"""Which server a turn goes to: a pure decision over what is believed of each.

The cost of server w for a request of n ids of which it is believed to hold h is in seconds, those of others included:

    J = W + (1 + D) · (T(n - h) + T(p)) + x + E[decode] / rate(b + 1) + S

W: the prompts queued there; T: computing what is not held, and p, what is pushed out of conversations that come back; D: how
many requests wait longer for that, which are those that come before the server is idle again; x: restoring what lies in host
memory; then the turn itself beside b others, and S: how much it slows them down. Without D a request looks after itself
alone: it leaves a queue for an idle server, makes that one compute the whole conversation again, and all are worse off.

A conversation stays where it is unless another server is cheaper by `HYSTERESIS` of the cost of staying. One whose KV has
room nowhere waits: servers that hold a little less than all conversations need push out each time what comes back next.
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
FILLED = 0.8
"""The part of a server's room that is given to conversations: the rest is for what they add, and for what ended ones left."""
AWAY_SECONDS = 60.0
"""For so long a conversation is believed to come back, and its room is kept."""
MOST = 0.5
"""A conversation of which more is missing, or was when it was asked for, was pushed out. Less is a matter of whole blocks."""


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
    room: float = math.inf
    """Ids that the conversation may have there before it pushes out those of others that come back."""
    arrivals: float = 0.0
    """Requests a second that come there."""
    busy: float = 0.0
    """The part of the time that it computes prompts."""
    conversations: int = 0
    """Others that are there, and come back."""
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
    work = own + pushed_out(request, server) / rates.prefill
    turn = rates.decode_seconds(request.expected, server.running)
    slowed = rates.slowed_seconds(request.expected, server.running)
    return wait + (1 + delayed(server, wait + own)) * work + server.restore_seconds + turn + slowed


def delayed(server: Candidate, queue_seconds: float) -> float:
    """D: how many requests come before a queue of that length is empty, by the mean busy period of a single server."""
    return min(server.conversations, server.arrivals * queue_seconds / max(1 - server.busy, NEVER_IDLE))


def pushed_out(request: Request, server: Candidate) -> float:
    """p: ids of others that come back."""
    needed = request.tokens + request.growth
    return min(needed, max(needed - server.room, 0.0))


def allowed(request: Request, servers: Sequence[Candidate]) -> list[Candidate]:
    """Those that may serve a request."""
    return [server for server in servers if server.is_open and server.version >= request.oldest_version]


def is_at_home(request: Request, server: Candidate, sticky: str | None) -> bool:
    """Whether the conversation was there and its KV still is: to go on takes no room of others that it has not got."""
    return server.name == sticky and server.held >= MOST * request.tokens


def has_room(request: Request, server: Candidate, sticky: str | None) -> bool:
    """Whether a request may go there now. A server with no other conversation takes any."""
    is_free = not server.conversations or not pushed_out(request, server)
    return is_free or is_at_home(request, server, sticky)


def choose(request: Request, servers: Sequence[Candidate], *, sticky: str | None = None) -> str | None:
    """The server for a request, or None if none may serve it or it has to wait for room. `sticky`: where it was."""
    able = [server for server in allowed(request, servers) if has_room(request, server, sticky)]
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


class Who(NamedTuple):
    """Whose request it is: a conversation, the group whose first `prompt` ids it shares, if it has one."""

    key: str
    group: str = ""
    prompt: int = 0


class Visit(NamedTuple):
    """One request that was sent to a server."""

    who: Who
    expected: int
    """Ids of it that the server was believed to hold."""
    missing: int


class Stay(NamedTuple):
    """A conversation that is at a server."""

    group: str
    own: int
    """Ids beyond what it shares."""
    until: float
    """It is believed to come back until then."""


class Kept(NamedTuple):
    """What is kept at a server for those that come back."""

    own: int
    """Ids of conversations beyond what they share."""
    prompts: int
    groups: frozenset[str]
    until: float
    """When the first of them is away for too long."""


@dataclass(slots=True)
class Belief:
    """What the router believes of one server: its load, and how much it holds of each conversation and group prompt.

    The server is believed to push out what was used longest ago, once there is more than its `room`.
    """

    rates: Rates = USUAL
    held: dict[str, int] = field(default_factory=dict)
    """Ids of prompts, and of conversations beyond them; what was used last comes last."""
    used: int = 0
    room: float = math.inf
    """Ids that it can hold, if it says so."""
    queued: float = 0.0
    running: int = 0
    stays: dict[str, Stay] = field(default_factory=dict)
    arrivals: Rate = field(default_factory=Rate)
    work: Rate = field(default_factory=Rate)
    """Seconds of computing prompts that were sent there."""
    kept: Kept | None = None
    """Of the conversations that stay, until something changes: a choice looks at all servers, and a turn changes one."""

    def candidate(self, name: str, who: Who, tokens: int, now: float, version: int = 0) -> Candidate:
        """The server as a request of `who` sees it."""
        kept, itself = self._kept(now), self.stays.get(who.key)
        others = kept.own + kept.prompts - (itself.own if itself else 0)
        shared = self.held.get(who.group, 0) if who.group in kept.groups else 0
        return Candidate(
            name, self.expect(who, tokens), queued=self.queued, running=self.running,
            room=FILLED * self.room - others + shared, arrivals=self.arrivals.seen(now), busy=self.work.seen(now),
            conversations=len(self.stays) - (itself is not None), version=version, rates=self.rates,
        )  # fmt: skip

    def expect(self, who: Who, tokens: int) -> int:
        """Ids of a prompt of `tokens` that it holds, as far as is known. Without its beginning the rest is of no use."""
        shared = min(self.held.get(who.group, 0), who.prompt)
        return min(shared + self.held.get(who.key, 0), tokens) if shared == who.prompt else shared

    def begin(self, who: Who, tokens: int, now: float) -> Visit:
        """A request was sent there: who is queued behind it will find its prompt computed."""
        expected = self.expect(who, tokens)
        visit = Visit(who, expected, tokens - expected)
        self.queued += visit.missing
        self.running += 1
        self.arrivals.add(1, now)
        self.work.add(visit.missing / self.rates.prefill, now)
        self._hold(who, tokens)
        self._stay(who, tokens, math.inf)
        return visit

    def began(self, visit: Visit) -> None:
        """Its first id came, so its prompt waits no more."""
        self.queued = max(self.queued - visit.missing, 0.0)

    def end(self, visit: Visit, cached: int | None, tokens: int, now: float) -> None:
        """The turn ended; its conversation has `tokens` ids now, and may come back.

        If most of what was expected was not cached, it had been pushed out, and with it all that was used longer ago.
        """
        self.running -= 1
        if cached is not None and cached < MOST * visit.expected:
            self._forget_before(visit.who.key)
        self._hold(visit.who, tokens)
        self._stay(visit.who, tokens, now + AWAY_SECONDS)

    def leave(self, key: str) -> None:
        """The conversation goes on elsewhere, or has ended; what it left is pushed out in its turn."""
        self.stays.pop(key, None)
        self.kept = None

    def forget(self, key: str) -> None:
        """Nobody will ask for this any more."""
        if key in self.held:
            self.used -= self.held.pop(key)
            self.kept = None

    def flush(self) -> None:
        """It holds nothing: it was restarted, flushed, or has new weights."""
        self.held.clear()
        self.used, self.kept = 0, None

    def _stay(self, who: Who, tokens: int, until: float) -> None:
        self.stays[who.key] = Stay(who.group, tokens - who.prompt, until)
        self.kept = None

    def _kept(self, now: float) -> Kept:
        if self.kept is None or now >= self.kept.until:
            self.stays = {key: stay for key, stay in self.stays.items() if stay.until > now}
            groups = frozenset(stay.group for stay in self.stays.values())
            self.kept = Kept(
                sum(stay.own for stay in self.stays.values()), sum(self.held.get(group, 0) for group in groups), groups,
                min((stay.until for stay in self.stays.values()), default=math.inf),
            )  # fmt: skip
        return self.kept

    def _hold(self, who: Who, tokens: int) -> None:
        """It holds so much of a conversation, and the prompt that comes before it, which is pushed out after it."""
        shared = max(who.prompt, self.held.get(who.group, 0))
        for name, count in ((who.key, tokens - who.prompt), (who.group, shared)):
            self.used += count - self.held.pop(name, 0)
            if count:
                self.held[name] = count
        while len(self.held) > MOST_HELD or (self.used > self.room and len(self.held) > 1):
            self.forget(next(iter(self.held)))

    def _forget_before(self, key: str) -> None:
        for older in list(self.held):
            if older == key:
                return
            self.forget(older)
