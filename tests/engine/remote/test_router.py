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


def test_a_request_pays_for_those_that_wait_for_it() -> None:
    """B is idle now and used half of the time: 10 s of prompts there hold up those of the next 20 s, 2 a second."""
    used = B._replace(arrivals=2.0, busy=0.5, conversations=100)
    assert cost(LONG, used) == 10.0 * (1 + 2.0 * 10.0 / 0.5) + 1.0
    assert cost(LONG, used._replace(conversations=3)) == 10.0 * (1 + 3) + 1.0, "no more than there are"
    busy = a(queued=12_000, arrivals=2.0, busy=0.5, conversations=100)
    assert choose(LONG, [busy, B], sticky="a") == "b"
    assert choose(LONG, [busy, used], sticky="a") == "a", "to compute it all again costs the others more than it gains"


def test_a_turn_slows_those_beside_it_once_they_share_the_rate() -> None:
    """20 turns of 50 ids/s use up 1,000: the one that comes next takes from each of them."""
    assert cost(LONG, B._replace(running=19)) == 10.0 + 1.0
    assert cost(LONG, B._replace(running=20)) == 10.0 + 50 / (1_000 / 21) + 20 * 50 / 1_000


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
        belief.begin(tokens, now=0.0)
        belief.end(key, expected=0, cached=0, tokens=tokens)
    assert (belief.running, belief.expect("s1", 5_000), belief.expect("s2", 600)) == (0, 1_000, 600)
    belief.end("s1", expected=1_000, cached=500, tokens=1_200)
    assert belief.expect("s1", 5_000) == 1_200
    assert belief.expect("old", 5_000) == 0, "what was used before it was pushed out with it"
    assert belief.expect("s2", 5_000) == 2_000
    belief.flush()
    assert belief.expect("s1", 5_000) == 0


def test_a_prompt_that_is_queued_is_held_for_those_behind_it() -> None:
    belief = Belief()
    belief.begin(800, now=1.0, shared=("group", 800))
    assert belief.candidate("x", ["session", "group"], 900, now=1.0)[:4] == ("x", 800, 800, 1)
    belief.began(800)
    assert belief.queued == 0


def test_rates_are_of_the_last_seconds_and_a_full_server_has_a_price() -> None:
    belief = Belief(rates=RATES)
    for now in range(200):
        belief.begin(500, now=float(now))
        belief.end("s", expected=0, cached=0, tokens=100)
    seen = belief.candidate("x", ["s"], 100, now=200.0)
    assert 0.9 < seen.arrivals < 1.1
    assert 0.45 < seen.busy < 0.55
    assert seen.eviction == 0.0
    assert belief.candidate("x", ["s"], 100, now=300.0).arrivals < 0.001
    belief.end("s", expected=100, cached=20, tokens=200)
    assert belief.candidate("x", ["s"], 100, now=200.0).eviction == 0.5 / 1_000
    belief.forget("s")
    assert belief.expect("s", 100) == 0
