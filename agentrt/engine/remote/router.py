"""Which server a turn goes to: a pure decision over what is believed of each.

The cost of server w for a request of n ids of which it is believed to hold h:

    J = W + T(n - h | h) + x + E[decode] / rate(b + 1) + λ · (n - h + g)

W: the prompts queued there, in seconds; T: computing what is not held; x: restoring what lies in host memory; then the turn
itself beside b others; λ: what pushing out that many ids of others costs, 0 while there is room. A conversation stays where
it is unless another server is cheaper by `HYSTERESIS` of the cost of staying, so that it does not move to and fro.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HYSTERESIS = 0.2
"""Part of the cost of staying that a move must save."""
NEAR = 0.05
"""Servers that cost this much more than the cheapest are as good; the tie is broken by the request's own number."""


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
    version: int = 0
    is_open: bool = True
    """False while it is paused, drained, or lacks the adapter."""
    rates: Rates = Rates()


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
    wait = server.queued / rates.prefill + server.room_seconds
    own = missing / rates.prefill + server.restore_seconds + rates.decode_seconds(request.expected, server.running)
    return wait + own + server.eviction * (missing + request.growth)


def choose(request: Request, servers: Sequence[Candidate], *, sticky: str | None = None) -> str | None:
    """The server for a request, or None if none may serve it. `sticky`: where its conversation was."""
    able = [server for server in servers if server.is_open and server.version >= request.oldest_version]
    if not able:
        return None
    costs = {server.name: cost(request, server) for server in able}
    best = min(costs.values())
    if sticky in costs and costs[sticky] - best <= HYSTERESIS * costs[sticky]:
        return sticky
    near = [name for name, one in costs.items() if one <= best * (1 + NEAR)]
    return near[request.tie % len(near)]


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
class Belief:
    """What the router believes of one server: its load, and how much it holds of each conversation and group prompt."""

    held: dict[str, int] = field(default_factory=dict)
    queued: float = 0.0
    running: int = 0

    def expect(self, key: str, tokens: int) -> int:
        """Ids of a prompt of `tokens` that it holds, as far as is known."""
        return min(self.held.get(key, 0), tokens)

    def begin(self, missing: int) -> None:
        """A request with so many ids to compute was sent there."""
        self.queued += missing
        self.running += 1

    def began(self, missing: int) -> None:
        """Its first id came, so its prompt waits no more."""
        self.queued = max(self.queued - missing, 0.0)

    def end(self, key: str, expected: int, cached: int | None, tokens: int) -> None:
        """The turn of a conversation ended, which has `tokens` ids now.

        If less than `expected` was cached, it had been pushed out, and with it all that was used longer ago.
        """
        self.running -= 1
        if cached is not None and cached < expected and key in self.held:
            for older in list(self.held):
                if older == key:
                    break
                del self.held[older]
        self.hold(key, tokens)

    def hold(self, key: str, tokens: int) -> None:
        """It holds `tokens` ids of this; what was used last is the last of `held`."""
        self.held.pop(key, None)
        self.held[key] = tokens

    def flush(self) -> None:
        """It holds nothing: it was restarted, flushed, or has new weights."""
        self.held.clear()
