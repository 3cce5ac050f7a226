"""The router's choices, where the arithmetic says."""

from agentrt.engine.remote.router import Belief, Candidate, Rates, Request, choose, choose_group, cost

RATES = Rates(prefill=1_000, decode=1_000, most_decode=50)
LONG = Request(tokens=10_000, expected=50)


def a(queued: float, **more: object) -> Candidate:
    return Candidate("a", held=9_000, queued=queued, rates=RATES)._replace(**more)


B = Candidate("b", held=0, rates=RATES)


def test_the_choice_flips_where_the_queue_costs_as_much_as_the_prefix() -> None:
    """A holds 9,000 of 10,000 ids and has a queue, B is idle: at 1,000 ids/s the prefix is worth 9 s."""
    assert cost(LONG, a(queued=0)) == 1.0 + 1.0
    assert cost(LONG, B) == 10.0 + 1.0
    assert choose(LONG, [a(queued=8_000), B]) == "a"
    assert choose(LONG, [a(queued=10_000), B]) == "b"
    flip = next(queued for queued in range(0, 20_000, 10) if cost(LONG, a(queued)) > cost(LONG, B))
    assert flip == 9_010


def test_a_conversation_moves_only_for_a_fifth_of_the_cost_of_staying() -> None:
    assert choose(LONG, [a(queued=11_000), B], sticky="a") == "a"  # 13 s against 11
    assert choose(LONG, [a(queued=12_000), B], sticky="a") == "b"  # 14 s against 11
    assert choose(LONG, [a(queued=12_000), B], sticky="gone") == "b"


def test_versions_and_closed_servers_are_constraints() -> None:
    new = LONG._replace(oldest_version=3)
    assert choose(new, [a(0, version=2), B._replace(version=3)]) == "b"
    assert choose(new, [a(0, version=2), B]) is None
    assert choose(LONG, [a(0, is_open=False), B]) == "b"
    assert choose(LONG, []) is None


def test_pushing_out_others_and_restoring_count() -> None:
    full = Candidate("full", held=0, eviction=0.002, rates=RATES)
    assert choose(LONG._replace(growth=500), [full, B]) == "b"
    assert cost(LONG._replace(growth=500), full) == 11.0 + 0.002 * 10_500
    assert cost(LONG, a(0, restore_seconds=0.5)) == 2.5


def test_ties_are_broken_by_the_request() -> None:
    servers = [Candidate(name, held=0, rates=RATES) for name in "xyz"]
    assert [choose(LONG._replace(tie=tie), servers) for tie in range(4)] == ["x", "y", "z", "x"]


def test_a_group_stays_together_for_its_prefix_and_splits_when_the_queue_is_longer() -> None:
    servers = [Candidate(name, held=0, rates=RATES) for name in "xy"]
    assert len(set(choose_group(LONG, servers, 8))) == 1, "the prefix is worth more than the load"
    short = Request(tokens=100, expected=1_000)
    placed = choose_group(short, [one._replace(rates=Rates(1_000, 50, 50)) for one in servers], 8)
    assert sorted(map(placed.count, "xy")) == [4, 4], "computing a short prompt twice is cheaper than waiting"


def test_beliefs_are_corrected() -> None:
    belief = Belief()
    for key, tokens in (("old", 500), ("s1", 1_000), ("s2", 2_000)):
        belief.begin(tokens)
        belief.end(key, expected=0, cached=0, tokens=tokens)
    assert (belief.running, belief.expect("s1", 5_000), belief.expect("s2", 600)) == (0, 1_000, 600)
    belief.end("s1", expected=1_000, cached=500, tokens=1_200)
    assert belief.expect("s1", 5_000) == 1_200
    assert belief.expect("old", 5_000) == 0, "what was used before it was pushed out with it"
    assert belief.expect("s2", 5_000) == 2_000
    belief.flush()
    assert belief.expect("s1", 5_000) == 0
